"""A model of the time of a collective on the ranks that it was measured on.

A dense sum takes what its algorithm took at a few sizes, with straight lines in between.

A sparse one also depends on the part of the elements that are entries.  So it has a formula next to
its algorithm, in :mod:`hvd_compress.mpi.sparse`.  A round costs ``alpha`` seconds, a byte ``beta``,
and every message beyond the first of a round ``overhead``.  Each entry that is packed, unpacked and
added costs ``merge``.

A byte does not cost the same in every pattern of messages.  In a ring a rank sends to one and
receives from another.  In a pair it does both with one, in a fan with all at once.  Formulas leave
out other costs of a call.  They are corrected by the ratio of measured to modelled time at a few
numbers of entries.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from hvd_compress.config import is_number, is_whole
from hvd_compress.errors import ConfigError
from hvd_compress.mpi.dense import ALGORITHMS as DENSE
from hvd_compress.mpi.sparse import ALGORITHMS as SPARSE
from hvd_compress.mpi.sparse.algorithm import EntryCount
from hvd_compress.mpi.transport.arrays import HALVES

#: one element in so many is an entry where sparse algorithms are measured
SPARSITY = 1000

#: (bytes, seconds), or (entries, seconds)
Points = tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Measured constants of one communicator; they are equal on all ranks, so all choose alike.

    Attributes:
        size: number of ranks that it was measured on.
        alpha: seconds of a round with one small message out and one in.
        beta: seconds per byte, sending to one rank and receiving from another at once.
        overhead: seconds of one more message in the same round.
        points: by algorithm, (bytes, seconds) of a dense allreduce of float32, ascending.
        beta_pair, beta_fan: ``beta`` with one partner, and with all at once; ``None``: the same.
        merge: seconds for an entry of a sparse vector.
        sparse_points: by algorithm, (entries, seconds) of sparse allreduces, ascending: entries on
            each rank, of 8 bytes each, in ``SPARSITY`` times as many elements.

    >>> model = CostModel(size=4, alpha=1e-5, beta=1e-9, overhead=1e-6)
    >>> model.fastest_sparse(k=10, n=10_000), model.fastest_sparse(k=50_000, n=100_000)
    ('allgather', 'split_allgather')
    """

    size: int
    alpha: float
    beta: float
    overhead: float
    points: Mapping[str, Points] = dataclasses.field(default_factory=dict)
    beta_pair: float | None = None
    beta_fan: float | None = None
    merge: float = 0.0
    sparse_points: Mapping[str, Points] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not is_whole(self.size) or self.size < 1:
            raise ConfigError(f"size must be a number of ranks, 1 or more; got {self.size!r}")
        for name in ("alpha", "beta", "overhead", "beta_pair", "beta_fan", "merge"):
            value = getattr(self, name)
            if value is None and name in ("beta_pair", "beta_fan"):
                continue
            if not is_number(value) or not 0 <= value < math.inf:
                raise ConfigError(f"{name} must be seconds, 0 or more; got {value!r}")
        _check_points("points", self.points, DENSE, "bytes")
        _check_points("sparse_points", self.sparse_points, SPARSE, "entries")

    @property
    def pair(self) -> float:
        return self.beta if self.beta_pair is None else self.beta_pair

    @property
    def fan(self) -> float:
        return self.beta if self.beta_fan is None else self.beta_fan

    @property
    def round_with_all(self) -> float:
        """The seconds of a round of small messages with all other ranks."""
        return self.alpha + (self.size - 2) * self.overhead

    def seconds(self, algorithm: str, n: int) -> float:
        """Return the seconds of a dense allreduce of ``n`` bytes."""
        if self.size == 1:
            return 0.0
        if algorithm not in self.points:
            raise ConfigError(
                f"algorithm={algorithm!r} was not measured; {sorted(self.points)} were"
            )
        return _interpolate(self.points[algorithm], n)

    def fastest(
        self,
        n: int,
        dtype: str = "float32",
        among: Iterable[str] = DENSE,
    ) -> str:
        """Return the dense algorithm that is expected to be fastest for ``n`` bytes."""
        costs = {}
        for name in among:
            # Partial sums of half precisions are sent as float32, in some rounds or in all of them.
            sent = int(n * DENSE[name].half_factor) if dtype in HALVES else n
            costs[name] = self.seconds(name, sent)
        return min(costs, key=lambda name: (costs[name], name))

    def sparse_seconds(
        self, algorithm: str, k: int, n: int, *, pair: float = 8, item: int = 4
    ) -> float:
        """Return the seconds of a sparse allreduce: ``k`` of ``n`` elements on each rank, at places
        that are independent between ranks.

        Args:
            pair: bytes for an index with its value.
            item: bytes for a dense value.
        """
        modelled = self.sparse_formula(algorithm, k, n, pair=pair, item=item)
        if algorithm not in self.sparse_points:
            return modelled
        points = self.sparse_points[algorithm]
        places = [math.log(count) for count, _ in points]
        ratios = [
            seconds / self.sparse_formula(algorithm, count, SPARSITY * count)
            for count, seconds in points
        ]
        return modelled * float(np.interp(math.log(max(k, 1)), places, ratios))

    def sparse_formula(
        self, algorithm: str, k: int, n: int, *, pair: float = 8, item: int = 4
    ) -> float:
        """Return the seconds by rounds, bytes and entries alone; see :meth:`sparse_seconds`."""
        if algorithm not in SPARSE:
            raise ConfigError(f"algorithm={algorithm!r} has no cost model")
        entries = EntryCount(k, n, pair, item)
        return 0.0 if self.size == 1 else SPARSE[algorithm].seconds(self, entries, self.size)

    def fastest_sparse(self, k: int, n: int, *, pair: float = 8, item: int = 4) -> str:
        """Return the sparse algorithm that is expected to be fastest, of those that lose
        nothing."""
        costs = {name: self.sparse_seconds(name, k, n, pair=pair, item=item) for name in SPARSE}
        return min(costs, key=lambda name: (costs[name], name))

    def save(self, path: str | Path) -> None:
        """Save the model as JSON, for runs that do not measure again."""
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """Return the model that :meth:`save` wrote."""
        try:
            values = json.loads(Path(path).read_text())
            for field in ("points", "sparse_points"):
                values[field] = {
                    name: tuple((int(n), float(s)) for n, s in points)
                    for name, points in values[field].items()
                }
            return cls(**values)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise ConfigError(
                f"{path} holds no cost model ({error}): delete it, and it is measured again"
            ) from None


def _check_points(
    field: str, points_of: Mapping[str, Points], names: Iterable[str], unit: str
) -> None:
    for name, points in points_of.items():
        sizes = [n for n, _ in points]
        if name not in names:
            raise ConfigError(f"{field}: {name!r} is not one of {', '.join(names)}")
        if len(sizes) < 2 or sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise ConfigError(f"{name} must have two or more ascending sizes; got {sizes}")
        if not all(0 <= value < math.inf for point in points for value in point):
            raise ConfigError(f"{name} must be pairs of {unit} and seconds; got {points!r}")


def _interpolate(points: Points, n: int) -> float:
    """Return the time of ``n`` bytes, linear between the points; beyond the last, the last piece is
    continued."""
    sizes, seconds = zip(*points, strict=True)
    if n <= sizes[-1]:
        return float(np.interp(n, sizes, seconds))
    slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
    return seconds[-1] + max(slope, 0.0) * (n - sizes[-1])
