"""Elements at places that all ranks draw alike: one sum of the values of all tensors.

A chain of error feedback and a sum of drawn elements treats a bucket at once.  Its blocks treat one
tensor after the other, with the same bits; tests hold the two equal.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Hashable, Sequence
from typing import Any, ClassVar

import numpy as np

from hvd_compress.backends import numpy
from hvd_compress.base import Context, Sparse, Spec
from hvd_compress.fused.in_place import Arrays
from hvd_compress.fused.messages import scattered
from hvd_compress.fused.stages import StagedForm, StagedPlan
from hvd_compress.kernels.codecs import all_finite
from hvd_compress.operators.at_random import random_k, shared_generator
from hvd_compress.requests import Request, Sum
from hvd_compress.times import begin_phase


@dataclasses.dataclass(frozen=True, eq=False)
class FusedDrawn(StagedForm):
    """A form for whole buckets; see :class:`hvd_compress.fused.in_place.InPlaceForm`.

    Attributes:
        select: how many elements.
        unbiased: values are scaled by n/k.
        wire, algorithm: of the sum.
    """

    sends_all: ClassVar[bool] = False

    select: random_k
    unbiased: bool
    wire: str | None
    algorithm: str | None

    def weight(self, context: Context) -> int:
        return self.select.count(math.prod(context.shape), context)

    def plan(self, specs: Sequence[Spec], key: Hashable, step: Context) -> DrawnPlan:
        return DrawnPlan(self, specs, key, step)


class DrawnPlan(StagedPlan):
    """The plan of a bucket; see :mod:`hvd_compress.fused.drawn`."""

    form: FusedDrawn

    def __init__(
        self, form: FusedDrawn, specs: Sequence[Spec], key: Hashable, step: Context
    ) -> None:
        super().__init__(form, specs, key, step)
        self._values = np.empty(sum(self.weights), np.float32)
        self.requests = [Sum(self._values, form.wire, form.algorithm)]
        self._longest = max(self.sizes)

    def meet(self, arrays: Arrays, step: Context) -> Generator[Request, Any, list[bool]]:
        form = self.form
        begin_phase("search")
        places = [
            form.select.draw(n, k, shared_generator(step._replace(name=name)))
            for name, n, k in zip(self.names, self.sizes, self.weights, strict=True)
        ]
        begin_phase("encode")
        self._encode(arrays, places, step)
        total = yield self.requests[0]
        begin_phase("add_up")
        with np.errstate(over="ignore", invalid="ignore"):
            mean = total / np.float32(self.size)
            return self._settle(arrays, places, mean, step)

    def _by_tensor(self, values: np.ndarray) -> list[np.ndarray]:
        return np.split(values, np.cumsum(self.weights)[:-1])

    def _encode(self, arrays: Arrays, places: list[np.ndarray], step: Context) -> None:
        """Write the values that are sent."""
        views, values = arrays.views, self._by_tensor(self._values)
        with np.errstate(over="ignore", invalid="ignore"):
            for i, (n, at, out) in enumerate(zip(self.sizes, places, values, strict=True)):
                its = arrays.context(step, i)
                x = self.passed_on(views, i, slice(0, n), its, self._longest)
                # Whatever is drawn, the others must see that this step is not finite.
                out[:] = x[at] if all_finite(x) else np.nan
                if self.form.unbiased:
                    out *= np.float32(n / at.size)

    def _settle(
        self, arrays: Arrays, places: list[np.ndarray], mean: np.ndarray, step: Context
    ) -> list[bool]:
        """Write averages and states; return of which tensors they are finite."""
        views, finite = arrays.views, []
        values = self._by_tensor(numpy.round_to(self._values, self.form.wire))
        for i, (at, its_mean) in enumerate(zip(places, self._by_tensor(mean), strict=True)):
            finite.append(bool(np.isfinite(its_mean).all()))
            self.settle(
                *(views, i, slice(0, self.sizes[i]), arrays.context(step, i)),
                *(Sparse(at, values[i]) if finite[i] else None, scattered(at, its_mean)),
            )
        return finite
