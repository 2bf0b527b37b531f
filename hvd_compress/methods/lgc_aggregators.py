"""Selected elements as the latent of an autoencoder that the ranks have trained on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array
from hvd_compress.chain import Aggregated
from hvd_compress.codecs.floats import plain
from hvd_compress.codecs.frame import coded_size, decode_coded
from hvd_compress.codecs.top_k import count
from hvd_compress.config import check_fraction, checked, numbers
from hvd_compress.meetings.leader_top_k import joined
from hvd_compress.methods import lgc_numpy_network as numpy_network
from hvd_compress.methods.lgc_layout import latent_size
from hvd_compress.methods.lgc_learning import (
    CodedTensor,
    Learned,
    bounds,
    encode_all,
    product,
    selected,
)
from hvd_compress.methods.lgc_network import network_of
from hvd_compress.requests import Gather, Request, Sum
from hvd_compress.wire import decode_sparse, encode_sparse, sparse_size

#: avoids 0 / 0
_TINY = 1e-30


@dataclasses.dataclass(frozen=True)
class learned_allreduce(Learned, name="learned_allreduce"):
    """Latents are summed, and every rank decodes their mean::

        z = sum over the ranks of encode(values / s) / N;   mean = a decode(z)

    where s is the largest magnitude among the leader's values, sent with the indices.  The factor a
    takes the result as near to the mean of the values as it gets, by a sum of one number.

    Options: ``density``, ``start`` and ``rate``, as for :class:`learned_server`.

    Reference: the ring-allreduce instance of Abrahamyan et al., TNNLS 2021.

    >>> from hvd_compress.blocks import chain
    >>> via = learned_allreduce(density=0.1, start=5)
    >>> world, x = World(chain(via=via), size=2), np.sin(np.arange(1000.0))
    >>> sent = [world.record.bytes_sent for step in range(10) if world.exchange([x, x])]
    >>> sent[0], sent[9] - sent[8]
    (904, 176)
    """

    def _example(
        self, rows: np.ndarray, leader: int, counts: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        values = rows / np.repeat(largest_of(rows[leader], counts), counts)
        return values, values.mean(0), None

    def _aggregate_coded(
        self, parts: Sequence[CodedTensor], weights: Array
    ) -> Generator[Request, Any, list[Aggregated]]:
        x, context, counts = parts[0].x, parts[0].context, [part.k for part in parts]
        xp, k, tensors = backend_of(x), sum(counts), len(parts)
        dtype = xp.dtype(x)

        def scales_of(values: Array) -> Array:
            def found(values: np.ndarray) -> list[np.ndarray]:
                return [largest_of(values, counts)]

            return xp.on_host(found, [values], [(dtype, tensors)], x)[0]

        def decode(weights: np.ndarray, total: np.ndarray) -> list[np.ndarray]:
            latent = total.reshape(1, -1) / total.dtype.type(context.size)
            return [numpy_network.decode(weights, latent, k, None)[0]]

        def fit(decoded: np.ndarray, products: np.ndarray, scales: np.ndarray) -> list[np.ndarray]:
            with np.errstate(invalid="ignore"):  # of a non-finite step
                factors = nearest(products / context.size, decoded, counts) * scales
            return [decoded * np.repeat(factors, counts).astype(decoded.dtype)]

        choice, scales = yield from selected(parts, scales_of, tensors)
        values = choice.values / _repeated(xp, scales, counts)
        latent = network_of(x).encode(weights, xp.reshape(values, (1, k)))
        total = yield Sum(xp.reshape(latent, (-1,)))
        (decoded,) = xp.on_host(decode, [weights, total], [(dtype, k)], x)
        pairs = [(values[i:j], decoded[i:j]) for i, j in bounds(counts)]
        products = yield Sum(joined(xp, [product(xp, a, b) for a, b in pairs]))
        (result,) = xp.on_host(fit, [decoded, products, scales], [(dtype, k)], x)
        return choice.spread(result, result)


@dataclasses.dataclass(frozen=True)
class learned_server(Learned, name="learned_server"):
    """One latent stands for all ranks, and each adds its largest values, its innovation::

        z = encode(values / s) on the leader;   mean = sum of a_i decode_i(z, innovation_i) / N

    where a_i takes the result as near to the values of rank i as it gets.  It is sent with the
    innovation; s and a_i are numbers of each tensor.

    Options:
        density, start, rate: of training, see :class:`~hvd_compress.LGC`;
            training ends at ``start``, its ``code``.
        innovation: fraction of the selected values that every rank sends beside the latent.
        decoders: rank i decodes by decoder i modulo their number.

    Reference: the parameter-server instance of Abrahamyan et al., TNNLS 2021.

    The bytes that rank 0 sends in a step of training, and in one after it; k = 100 float64:

    >>> from hvd_compress.blocks import chain
    >>> via = learned_server(density=0.1, start=5)
    >>> world, x = World(chain(via=via), size=2), np.sin(np.arange(1000.0))
    >>> sent = [world.record.bytes_sent for step in range(10) if world.exchange([x, x])]
    >>> sent[0], sent[9] - sent[8]
    (904, 64)
    """

    innovation: float = checked(check_fraction, 0.01)  # type: ignore[misc]
    decoders: int = checked(  # type: ignore[misc]
        numbers("a number, 1 or more", lambda n: n >= 1, whole=True), 1
    )

    def _example(
        self, rows: np.ndarray, leader: int, counts: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        values = np.stack([row / np.repeat(largest_of(row, counts), counts) for row in rows])
        innovations = np.zeros_like(values)
        for own, row in zip(innovations, values, strict=True):
            places = self._places(row)
            own[places] = row[places]
        return values, values, innovations

    def _places(self, values: np.ndarray) -> np.ndarray:
        m = count(values.size, self.innovation)
        return np.sort(np.argsort(-np.abs(values), kind="stable")[:m])

    def _aggregate_coded(
        self, parts: Sequence[CodedTensor], weights: Array
    ) -> Generator[Request, Any, list[Aggregated]]:
        x, context, counts = parts[0].x, parts[0].context, [part.k for part in parts]
        xp, ranks, k, tensors = backend_of(x), context.size, sum(counts), len(parts)
        dtype, m = xp.dtype(x), count(k, self.innovation)
        size = sparse_size(m, k, dtype)
        factors_size = coded_size(plain(), tensors, np.dtype(dtype))

        def scaled(values: np.ndarray) -> list[np.ndarray]:
            with np.errstate(invalid="ignore"):  # of a non-finite step
                return [values / np.repeat(largest_of(values, counts), counts)]

        def latent_of(values: Array) -> Array:
            rows = xp.reshape(xp.on_host(scaled, [values], [(dtype, k)], x)[0], (1, k))
            return xp.reshape(network_of(x).encode(weights, rows), (-1,))

        def encode(weights: np.ndarray, latent: np.ndarray, values: np.ndarray) -> list[np.ndarray]:
            (normal,) = scaled(values)
            places = self._places(normal)
            own = normal[places]
            with np.errstate(invalid="ignore"):
                innovation = _spread(places, own, k)[None]
                row = numpy_network.decode(weights, latent[None], k, innovation, context.rank)[0]
                products = [
                    np.sum(values[i:j] * row[i:j], dtype=np.float64) for i, j in bounds(counts)
                ]
                factors = nearest(np.array(products), row, counts)
            frames = encode_sparse(places, own, k), encode_all(factors.astype(dtype))[0]
            return [np.concatenate(frames)]

        def decode(
            weights: np.ndarray, latent: np.ndarray, *frames: np.ndarray
        ) -> list[np.ndarray]:
            innovations, factors = [], []
            for rank, frame in enumerate(frames):
                sender = f"rank {rank}"
                places, own = decode_sparse(frame[:size], k, dtype, m, sender=sender)
                innovations.append(_spread(places, own, k))
                code = frame[size:]
                _, found = decode_coded(plain(), code, tensors, np.dtype(dtype), sender=sender)
                factors.append(np.repeat(found, counts))
            with np.errstate(invalid="ignore"):
                latents = np.repeat(latent[None], ranks, 0)
                rows = numpy_network.decode(weights, latents, k, np.stack(innovations))
                rows *= np.stack(factors)
                return [rows.sum(0) / rows.dtype.type(ranks), rows[context.rank]]

        choice, latent = yield from selected(parts, latent_of, latent_size(k))
        own = [weights, latent, choice.values]
        (frame,) = xp.on_host(encode, own, [("uint8", size + factors_size)], x)
        frames = yield Gather(frame, equal_sizes=True)
        mean, sent = xp.on_host(decode, [weights, latent, *frames], [(dtype, k), (dtype, k)], x)
        return choice.spread(mean, sent)


def largest_of(values: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """Return the largest magnitude among the first ``counts[0]`` values, the next ``counts[1]`` and
    so on; 1 where all are zero, NaN where one is."""
    found = np.array([np.abs(values[i:j]).max() for i, j in bounds(counts)], values.dtype)
    return np.where(found != 0, found, values.dtype.type(1))


def nearest(products: np.ndarray, decoded: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """Return the factor a of each tensor that makes |values - a decoded| least there, given the
    scalar products of the two."""
    energies = [np.sum(np.square(decoded[i:j], dtype=np.float64)) for i, j in bounds(counts)]
    return products / (np.array(energies) + _TINY)


def _repeated(xp: Any, scales: Array, counts: Sequence[int]) -> Array:
    """Return the scale of each tensor for each of its values."""
    if len(counts) == 1:
        return scales
    return xp.take(scales, xp.from_numpy(np.repeat(np.arange(len(counts)), counts), scales))


def _spread(places: np.ndarray, values: np.ndarray, k: int) -> np.ndarray:
    dense = np.zeros(k, values.dtype)
    dense[places] = values
    return dense
