"""The times of collectives on the ranks that they were measured on.

A call takes what its algorithm took at a few sizes, with straight lines in between.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from hvd_compress.config import is_whole
from hvd_compress.errors import ConfigError
from hvd_compress.mpi.collectives.dense import ALGORITHMS as DENSE
from hvd_compress.mpi.collectives.sparse import ALGORITHMS as SPARSE
from hvd_compress.mpi.transport.arrays import HALVES

#: one element in so many is an entry where sparse algorithms are measured
SPARSITY = 1000

#: (bytes, seconds), or (entries, seconds)
Points = tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Measured times of one communicator; they are equal on all ranks, so all choose alike.

    Attributes:
        size: number of ranks that it was measured on.
        points: by algorithm, (bytes, seconds) of a dense allreduce of float32, ascending.
        sparse_points: by algorithm, (entries, seconds) of sparse allreduces, ascending: entries on
            each rank, of 8 bytes each, in ``SPARSITY`` times as many elements.

    >>> points = {"direct": ((8, 1e-5), (800, 1e-4)), "ring": ((8, 4e-5), (800, 6e-5))}
    >>> model = CostModel(size=4, points={**points, "halving_doubling": ((8, 3e-5), (800, 9e-5))})
    >>> model.fastest(100), model.fastest(600)
    ('direct', 'ring')
    """

    size: int
    points: Mapping[str, Points] = dataclasses.field(default_factory=dict)
    sparse_points: Mapping[str, Points] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not is_whole(self.size) or self.size < 1:
            raise ConfigError(f"size must be a number of ranks, 1 or more; got {self.size!r}")
        _check_points("points", self.points, DENSE, "bytes")
        _check_points("sparse_points", self.sparse_points, SPARSE, "entries")

    def seconds(self, algorithm: str, n: int) -> float:
        """Return the seconds of a dense allreduce of ``n`` bytes."""
        return self._seconds(self.points, algorithm, n)

    def fastest(self, n: int, dtype: str = "float32") -> str:
        """Return the dense algorithm that is expected to be fastest for ``n`` bytes."""
        costs = {}
        for name, algorithm in DENSE.items():
            # Partial sums of half precisions are sent as float32, in some rounds or in all of them.
            sent = int(n * algorithm.half_factor) if dtype in HALVES else n
            costs[name] = self.seconds(name, sent)
        return min(costs, key=lambda name: (costs[name], name))

    def sparse_seconds(self, algorithm: str, k: int) -> float:
        """Return the seconds of a sparse allreduce of ``k`` entries on each rank."""
        return self._seconds(self.sparse_points, algorithm, k)

    def fastest_sparse(self, k: int) -> str:
        """Return the sparse algorithm that is expected to be fastest for ``k`` entries on each
        rank."""
        return min(SPARSE, key=lambda name: (self.sparse_seconds(name, k), name))

    def _seconds(self, points: Mapping[str, Points], algorithm: str, n: int) -> float:
        if self.size == 1:
            return 0.0
        if algorithm not in points:
            raise ConfigError(f"algorithm={algorithm!r} was not measured; {sorted(points)} were")
        return _interpolate(points[algorithm], n)

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
