"""Learned gradient compression on a parameter server (Abrahamyan et al., TNNLS 2021).

The server names one worker after the other the *common* one.  With v of all compressed tensors end
to end, s the largest value of the common worker in each tensor, and I the places where the k =
ceil(density * n) largest elements of each tensor are on the common worker::

    until `learn`       workers send v whole
    in each later step  every worker sends its innovation: its largest elements, of which there are
                        innovation * k, with their places; the common one also sends I
    until `code`        the server tells all workers I, they send v[I], and the server makes a step
                        of training: all are decoded from the common worker's latent
    from `code` on      the common worker also sends s and z = encode(v[I] / s); the server has
                        r_i = s decode_i(z, innovation_i / s) and tells worker i I and r_i, who
                        sends a number a_i for each tensor: that with which a_i r_i is nearest to
                        v[I]
    the gradient        is the mean of what worker i counts as sent: v[I], or a_i r_i, at I, and its
                        innovation where that is

The server trains, has a decoder for each worker, and sends the encoder to all workers when training
is over.  Tensors that LGC averages whole send their velocity.

Differs from the paper in: the common worker changes, or what is large on others only would never be
sent; workers train on values at the common places, which takes a second message, where those of the
paper send theirs at their own; innovations count exactly at their own places, and are not input of
the decoder alone; s and a_i.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping

import numpy as np

from hvd_compress.aggregators._leader import no_values
from hvd_compress.aggregators._learning import bounds, natural
from hvd_compress.autoencoder import LEAST
from hvd_compress.base import Context
from hvd_compress.codecs.frame import decode_coded
from hvd_compress.errors import PayloadError
from hvd_compress.methods import LGC
from hvd_compress.operators import top_k
from hvd_compress.operators.top_k import count
from hvd_compress.schedules import started
from hvd_compress.systems.servers.pieces import array_of

FLOAT = np.dtype(np.float32)


class Phase(enum.IntEnum):
    """What workers send of compressed tensors, in the end."""

    WHOLE = 0
    VALUES = 1
    LATENT = 2


class Layout:
    """Which tensors are compressed, end to end in the order of their names, and how many elements
    of each are sent.

    Attributes:
        coded, whole: names of tensors.
        sizes, counts, innovations: numbers of elements, of common ones, and of those that each
            worker sends for itself, of each tensor in ``coded``.
    """

    def __init__(self, method: LGC, arrays: Mapping[str, np.ndarray]) -> None:
        def is_coded(name: str) -> bool:
            x = arrays[name]
            return method.compresses(x.shape) and count(x.size, method.density) < x.size

        self.method = method
        self.coded = sorted(filter(is_coded, arrays), key=natural)
        self.whole = [name for name in arrays if name not in self.coded]
        self.sizes = [arrays[name].size for name in self.coded]
        self.counts = [count(n, method.density) for n in self.sizes]
        self.innovations = [count(k, method.innovation) for k in self.counts]
        self.n, self.k, self.m = map(sum, (self.sizes, self.counts, self.innovations))

    def phase(self, step: int) -> Phase:
        if not self.coded or not started(self.method.learn, step, None):
            return Phase.WHOLE
        if self.k < LEAST or not started(self.method.code, step, None):
            return Phase.VALUES
        return Phase.LATENT

    def largest(self, flat: np.ndarray, counts: list[int], step: int) -> np.ndarray:
        """Return the places of so many largest elements of each tensor."""
        select, context = top_k(1.0, self.method.selection), Context(step=step)
        found = [
            start + select.select(flat[start:stop], k, context)
            for (start, stop), k in zip(bounds(self.sizes), counts, strict=True)
        ]
        return np.concatenate(found)

    def each(self, numbers: np.ndarray) -> np.ndarray:
        """Return the number of each tensor for each of its common elements."""
        return np.repeat(numbers, self.counts)

    def check(self, places: np.ndarray, counts: list[int], sender: str) -> None:
        ends = [0, *itertools.accumulate(self.sizes)]
        if np.diff(np.searchsorted(places, ends)).tolist() != counts:
            raise PayloadError(
                f"bad payload from {sender}: it has not {counts} places in tensors of {self.sizes} "
                "elements: the ranks' models or options differ"
            )


def floats(part: np.ndarray, size: int, sender: str) -> np.ndarray:
    """Return so many numbers from their bytes."""
    return array_of(part, np.empty(size, FLOAT), sender)


def places_in(part: np.ndarray, layout: Layout, sender: str) -> np.ndarray:
    """Return the places that a common worker has chosen."""
    places, _ = decode_coded(no_values(), part, layout.k, FLOAT, layout.n, sender=sender)
    assert places is not None
    layout.check(places, layout.counts, sender)
    return places
