"""The bytes of a bucket, which its tensors share by their weights."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.sharding import divided
from hvd_compress.stats import Record


def share_out(record: Record, records: Sequence[Record], weights: Sequence[int]) -> None:
    """Count the bytes of a common exchange to tensors, by their weights."""
    bounds = [0, *itertools.accumulate(weights)]
    sent, received = (_shares(n, bounds) for n in (record.bytes_sent, record.bytes_received))
    for own, its_sent, its_received in zip(records, sent, received, strict=True):
        own.bytes_sent = _plus(own.bytes_sent, its_sent)
        own.bytes_received = _plus(own.bytes_received, its_received)


def _plus(count: Any, n: Any) -> Any:
    """Return the sum.  A symbol is not added to 0, since each sum would be a node of its graph."""
    return n if isinstance(count, int) and count == 0 else count + n


def _shares(n: Any, bounds: Sequence[int]) -> Sequence[Any]:
    """Return the parts of ``n`` between the bounds, of which the last one is the whole."""
    if isinstance(n, int):
        return [divided(n, bounds[-1], start, stop) for start, stop in itertools.pairwise(bounds)]
    parts = divided(n, bounds[-1], np.array(bounds[:-1]), np.array(bounds[1:]))
    return backend_of(n).unstack(parts)  # a symbol: a few operations for all


class Tally:
    """Counts steps of a bucket whose tensors do the same in each, for all of them at once.

    Args:
        weights: by which tensors share the bytes of a step.
        extents: the elements and bytes of their gradients, uncompressed.
        sends_all: all elements are sent, not as many as the weights say.
    """

    def __init__(
        self, weights: Sequence[int], extents: Sequence[tuple[int, int]], sends_all: bool
    ) -> None:
        self.weights, self._extents, self._sends_all = weights, extents, sends_all
        self._bounds = np.array([0, *itertools.accumulate(weights)])
        self._clear()

    def _clear(self) -> None:
        self._steps, self._bytes = 0, np.zeros((2, len(self.weights)), np.int64)

    def count(self, record: Record) -> None:
        """Count a step, whose bytes ``record`` has."""
        self._steps += 1
        for row, n in zip(self._bytes, (record.bytes_sent, record.bytes_received), strict=True):
            fits = n * int(self._bounds[-1]) < 2**63
            bounds = self._bounds if fits else self._bounds.astype(object)
            row += divided(n, bounds[-1], bounds[:-1], bounds[1:]).astype(np.int64)

    def settle(self, names: Sequence[str], records: dict[str, Record]) -> None:
        """Add what was counted to the records of the tensors."""
        if not self._steps:
            return
        each = zip(names, self.weights, self._extents, self._bytes.T.tolist(), strict=True)
        for name, weight, (elements, nbytes), (sent, received) in each:
            record = records.setdefault(name, Record())
            record.steps += self._steps
            record.elements += self._steps * elements
            record.dense_bytes += self._steps * nbytes
            record.elements_sent += self._steps * (elements if self._sends_all else weight)
            record.bytes_sent += sent
            record.bytes_received += received
        self._clear()
