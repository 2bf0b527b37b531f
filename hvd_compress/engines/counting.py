"""The bytes of a bucket, which its tensors share by their weights."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.engines.base import alone
from hvd_compress.requests import Collective
from hvd_compress.sharding import divided
from hvd_compress.stats import Record


def counted(
    exchange: Generator[Any, Any, Any], record: Record, rank: int, size: int
) -> Generator[Collective, Any, Any]:
    """Return an exchange whose bytes are counted to ``record``."""

    def note(request: Collective, reply: Any) -> None:
        record.bytes_sent += request.nbytes
        count(record, request, reply, rank, size)

    return alone(exchange, note)


def count(record: Record, request: Collective, reply: Any, rank: int, size: int) -> None:
    """Count what a request has sent beside its own bytes, and what it has received."""
    sent, received = request.count(reply, rank, size)
    if not isinstance(sent, int) or sent:  # a symbol and 0 would be a node of a graph
        record.bytes_sent += sent
    record.bytes_received += received


def share_out(record: Record, records: Sequence[Record], weights: Sequence[int]) -> None:
    """Count the bytes of a common exchange to tensors, by their weights."""
    bounds = np.array([0, *itertools.accumulate(weights)])
    sent, received = (_shares(n, bounds) for n in (record.bytes_sent, record.bytes_received))
    for own, its_sent, its_received in zip(records, sent, received, strict=True):
        own.bytes_sent = _plus(own.bytes_sent, its_sent)
        own.bytes_received = _plus(own.bytes_received, its_received)


def _shares(n: Any, bounds: np.ndarray) -> Sequence[Any]:
    """Return the parts of ``n``, a number or a symbol, between the bounds."""
    is_number = isinstance(n, int)
    if is_number and n * int(bounds[-1]) >= 2**63:
        bounds = bounds.astype(object)
    parts = divided(n, bounds[-1], bounds[:-1], bounds[1:])
    if is_number:
        found: list[int] = parts.tolist()
        return found
    return backend_of(n).unstack(parts)  # a few operations for all


def _plus(count: Any, n: Any) -> Any:
    """Return the sum.  A symbol is not added to 0, since each sum would be a node of its graph."""
    return n if isinstance(count, int) and count == 0 else count + n


class Tally:
    """Counts the steps of a bucket for all of its tensors at once.

    Args:
        names: of the tensors.
        weights: by which tensors share the bytes of a step.
        extents: the elements and bytes of their gradients, uncompressed.
        counts: how many elements are sent of each; ``None`` where each step says it.
    """

    def __init__(
        self,
        names: Sequence[str],
        weights: Sequence[int],
        extents: Sequence[tuple[int, int]],
        counts: Sequence[int | None],
    ) -> None:
        self._names, self.weights, self.extents = names, weights, extents
        self._known = [0 if count is None else count for count in counts]
        self._bounds = np.array([0, *itertools.accumulate(weights)])
        self.clear()

    def clear(self) -> None:
        """Forget what was counted."""
        self._steps, self._sums = 0, np.zeros((3, len(self.weights)), np.int64)
        self._symbols: list[list[Any]] = []  # the same of each step of a graph

    def count(self, record: Record, counts: Any = None) -> None:
        """Count a step.

        Args:
            record: the bytes of all.
            counts: how many elements were sent of each, where that was not known.
        """
        self._steps += 1
        columns = [_shares(n, self._bounds) for n in (record.bytes_sent, record.bytes_received)]
        columns.append([0] * len(self.weights) if counts is None else counts)
        numbers = isinstance(record.bytes_sent, int) and isinstance(record.bytes_received, int)
        if numbers:
            self._sums += np.array(columns, np.int64)
        else:
            self._symbols.append(columns)

    def settle(self, records: dict[str, Record]) -> None:
        """Add what was counted to the records of the tensors."""
        if not self._steps:
            return
        own = [records.setdefault(name, Record()) for name in self._names]
        each = zip(own, self.extents, self._known, self._sums.T.tolist(), strict=True)
        for record, (elements, nbytes), known, (sent, received, found) in each:
            record.steps += self._steps
            record.elements += self._steps * elements
            record.dense_bytes += self._steps * nbytes
            record.elements_sent += self._steps * known + found
            record.bytes_sent += sent
            record.bytes_received += received
        for columns in self._symbols:
            for record, sent, received, found in zip(own, *columns, strict=True):
                record.bytes_sent = _plus(record.bytes_sent, sent)
                record.bytes_received = _plus(record.bytes_received, received)
                record.elements_sent = _plus(record.elements_sent, found)
        self.clear()
