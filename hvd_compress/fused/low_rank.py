"""Low rank of whole buckets: three passes over memory, and no fresh memory.

A chain of error feedback and factors treats a bucket at once.  Its blocks treat one tensor after
the other, with the same bits; tests hold the two equal.  The factors of all matrices are end to end
in two sums, which are in the memory of the gradients.

States are written in place in the last pass, when it is known that the mean is finite.  So they
need no second copy, and a step with a NaN or Inf on any rank leaves them as they were.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Hashable, Sequence
from typing import Any

import numpy as np

from hvd_compress.base import Array, Context, Spec
from hvd_compress.chain import Transform
from hvd_compress.fused.in_place import Arrays, InPlaceForm, InPlacePlan
from hvd_compress.kernels import loops_of
from hvd_compress.kernels.low_rank import matrix_shape
from hvd_compress.requests import Request, Sum
from hvd_compress.times import begin_phase
from hvd_compress.transforms import error_feedback

_R, _Q = "residual", "factor"


@dataclasses.dataclass(frozen=True, eq=False)
class FusedLowRank(InPlaceForm):
    """A form for whole buckets; see :class:`hvd_compress.fused.in_place.InPlaceForm`.

    Attributes:
        rank: columns of the factors, unless a matrix has fewer.
        feeds_back: whether there is error feedback.
    """

    rank: int
    feeds_back: bool

    @classmethod
    def of(cls, transforms: Sequence[Transform], rank: int) -> FusedLowRank | None:
        """Return the form of ``transforms`` and an exchange of two factors, if there is one."""
        if any(type(t) is not error_feedback or t.units != "gradient" for t in transforms):
            return None
        return cls((), rank, bool(transforms))

    def takes(self, x: Array) -> bool:
        loops = loops_of(x)
        most = None if loops is None else loops.low_rank.STEP.MOST_RANK
        return loops is not None and (most is None or self.rank <= most)

    def weight(self, context: Context) -> int:
        n, m = matrix_shape(context.shape)
        return min(n, m, self.rank) * (n + m)

    def plan(self, specs: Sequence[Spec], key: Hashable, step: Context) -> LowRankPlan:
        return LowRankPlan(self, specs, key, step)


class LowRankPlan(InPlacePlan):
    form: FusedLowRank

    def __init__(
        self, form: FusedLowRank, specs: Sequence[Spec], key: Hashable, step: Context
    ) -> None:
        super().__init__(form, specs, key, step)
        self.keys = (_Q, _R) if form.feeds_back else (_Q,)
        shapes = [matrix_shape(shape) for shape in self.shapes]
        ranks = [min(*shape, form.rank) for shape in shapes]
        #: of the factors that are kept
        self._widths = [m * rank for (_, m), rank in zip(shapes, ranks, strict=True)]
        like = specs[0].x
        self._step = loops_of(like).low_rank.STEP(shapes, ranks, self.size, like)
        self.requests = [Sum(self._step.rows), Sum(self._step.own)]

    def sizes_of(self, key: str) -> list[int]:
        return self._widths if key == _Q else self.sizes

    def meet(self, arrays: Arrays, step: Context) -> Generator[Request, Any, np.ndarray | None]:
        begin_phase("encode")
        rows = self._step.left(arrays.columns)
        total = yield Sum(rows, owned=True)
        begin_phase("encode")
        own = self._step.right(arrays.columns, total)
        total = yield Sum(own)
        begin_phase("add_up")
        finite: np.ndarray | None = self._step.settle(arrays.columns, total)
        return finite
