"""Statistics of exchanges: bytes are counted from the messages themselves."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hvd_compress.backends import backend_of
from hvd_compress.times import PHASES, BucketTimes, Times

#: keys of states under which residuals are kept, to be sent later
WAITING = ("residual", "memory", "owner_residual")


def norm_of_residual(state: Mapping[str, Any]) -> float | None:
    """Return the L2 norm of the residuals in a state of arrays; ``None`` if it has none."""
    found = [state[key] for key in WAITING if key in state]
    return math.hypot(*(float(backend_of(x).norm(x)) for x in found)) if found else None


@dataclasses.dataclass
class Record:
    """Totals of one tensor, or of all, on this rank.

    Attributes:
        steps: the number of exchanges.
        bytes_sent: the bytes that this rank handed to the collectives.
        bytes_received: the bytes that it got back: the other ranks' frames, or the summed array.
            A collective may move more bytes over the network, as a ring does.
        dense_bytes: the bytes of the uncompressed gradients.
        elements, elements_sent: the number of elements of the gradients, and of those sent.
        residual_norm: the current L2 norm of this rank's residuals (the entries of the state named
            in ``WAITING``); 0 without error feedback.

    >>> reducer = Reducer("topk:density=0.01", LocalEngine())
    >>> _ = reducer.reduce({"w": np.ones(10_000, np.float32)})
    >>> record = reducer.stats().layers["w"]
    >>> record.steps, record.bytes_sent, record.dense_bytes, record.elements_sent
    (1, 440, 40000, 100)
    >>> round(record.ratio, 1), record.density, round(record.residual_norm, 1)
    (90.9, 0.01, 99.5)
    """

    steps: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    dense_bytes: int = 0
    elements: int = 0
    elements_sent: int = 0
    residual_norm: float = 0.0

    @property
    def ratio(self) -> float:
        """The quotient dense_bytes / bytes_sent; 1 if nothing was sent yet."""
        return self.dense_bytes / self.bytes_sent if self.bytes_sent else 1.0

    @property
    def density(self) -> float:
        """The fraction of the elements that was sent; 1 if there was nothing to send."""
        return self.elements_sent / self.elements if self.elements else 1.0

    def plus(self, other: Record) -> Record:
        """Return the sum of two tensors' records over the same steps."""
        return Record(
            steps=max(self.steps, other.steps),
            bytes_sent=self.bytes_sent + other.bytes_sent,
            bytes_received=self.bytes_received + other.bytes_received,
            dense_bytes=self.dense_bytes + other.dense_bytes,
            elements=self.elements + other.elements,
            elements_sent=self.elements_sent + other.elements_sent,
            residual_norm=(self.residual_norm**2 + other.residual_norm**2) ** 0.5,
        )


@dataclasses.dataclass
class BucketRecord:
    """The exchanges of tensors that are sent together.

    Attributes:
        names: of the tensors.
        record: the sum of their records.
        times: where this rank's time went.
    """

    names: tuple[str, ...]
    record: Record
    times: BucketTimes


class Stats:
    """The result of ``stats()``: bytes, density and times since the beginning or
    ``reset_stats()``::

        stats = optimizer.compression.stats()
        print(stats.line())

    ``print(stats)`` shows a table, and :func:`hvd_compress.log_stats` writes scalars for
    TensorBoard and the like.

    Attributes:
        layers: a :class:`Record` of each tensor, by name.
        total: their sum.
        times: where this rank's time went, in seconds; ``None`` in graphs of TensorFlow.
        buckets: a :class:`BucketRecord` of tensors that are sent together; empty in graphs.
        choice: with ``compression="auto"`` the ``"method"`` in use and ``"why"``; otherwise
            ``None``.

    >>> reducer = Reducer("topk:density=0.01", LocalEngine())
    >>> _ = reducer.reduce({"w": np.ones((100, 100), np.float32), "b": np.ones(100, np.float32)})
    >>> stats = reducer.stats()
    >>> stats.layers["w"].elements_sent, stats.total.elements_sent, stats.total.dense_bytes
    (100, 101, 40400)
    >>> stats.line().partition(", 0 B received")[0]
    '1 steps, 448 B sent per step, 39.5 KiB dense (ratio of bytes 90.2, elements sent 1.0000%)'
    """

    def __init__(
        self,
        layers: Mapping[str, Record],
        times: Times | None = None,
        choice: Mapping[str, Any] | None = None,
        buckets: Mapping[str, tuple[Sequence[str], BucketTimes]] | None = None,
    ) -> None:
        self.times, self.choice = times, choice
        self.layers = dict(layers)
        self.total = _sum(self.layers.values())
        self.buckets = {
            label: BucketRecord(
                tuple(names),
                _sum(self.layers[name] for name in names if name in self.layers),
                dataclasses.replace(own),
            )
            for label, (names, own) in (buckets or {}).items()
        }

    def scalars(self, *, tensors: bool = False) -> dict[str, float]:
        """Return numbers by name, for a plot over the steps.

        Names begin with "total", with "buckets", or, with ``tensors=True``, with that of a tensor.

        ``total/...`` and those of tensors are the attributes of :class:`Record`, since the
        beginning or the last ``reset_stats()``.  ``buckets/...`` are bytes and seconds per step.
        """
        found: dict[str, float] = {}
        for name, record in [("total", self.total), *(self.layers.items() if tensors else ())]:
            for key in ("bytes_sent", "bytes_received", "ratio", "density", "residual_norm"):
                found[f"{name}/{key}"] = float(getattr(record, key))
        if self.times is not None:
            for key in PHASES:
                found[f"seconds a step/{key}"] = getattr(self.times, key) / max(self.times.steps, 1)
        for label, each in self.buckets.items():
            for key in ("bytes_sent", "bytes_received"):
                found[f"buckets/{label}/{key}"] = getattr(each.record, key) / max(
                    each.record.steps, 1
                )
            for key in (*PHASES, "under_way"):
                found[f"buckets/{label}/{key}"] = getattr(each.times, key) / max(
                    each.times.steps, 1
                )
        return found

    def line(self) -> str:
        """Return the totals in one line.  It shows both the ratio of bytes and the fraction of
        elements sent, since a method may send all elements in a few bits each."""
        t = self.total
        steps = max(t.steps, 1)
        return (
            f"{t.steps} steps, {human_bytes(t.bytes_sent / steps)} sent per step, "
            f"{human_bytes(t.dense_bytes / steps)} dense (ratio of bytes {t.ratio:.1f}, "
            f"elements sent {t.density:.4%}), {human_bytes(t.bytes_received)} received in all, "
            f"residual norm {t.residual_norm:.3g}"
            + (f"; {self.times.line()}" if self.times and self.times.steps else "")
            + (f"; auto: {self.choice['method']}" if self.choice else "")
        )

    def __str__(self) -> str:
        width = max([len("total"), *map(len, self.layers)])
        rows = [
            f"{'tensor':{width}}  {'steps':>7}  {'sent':>10}  {'received':>10}  {'dense':>10}"
            f"  {'dense/sent':>10}  {'elements':>8}  {'residual':>9}"
        ]
        for name, r in [*self.layers.items(), ("total", self.total)]:
            rows.append(
                f"{name:{width}}  {r.steps:>7}  {human_bytes(r.bytes_sent):>10}"
                f"  {human_bytes(r.bytes_received):>10}  {human_bytes(r.dense_bytes):>10}"
                f"  {r.ratio:>10.1f}  {r.density:>8.3%}  {r.residual_norm:>9.3g}"
            )
        return "\n".join(rows)


def _sum(records: Iterable[Record]) -> Record:
    return functools.reduce(Record.plus, records, Record())


def human_bytes(count: float) -> str:
    """Return a number of bytes as text: 1536 becomes "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
