"""Elements that are selected, or drawn by all ranks alike, of what elementwise transforms make of
the tensors of a bucket.

Such transforms are EF21's, say.  The elements are the largest, or those beyond a threshold, which
all ranks gather; or drawn ones, which they add up.  A chain of these treats a bucket at once.  Its
blocks treat one tensor after the other, with the same bits; tests hold the two equal.  The result
of momentum correction and error feedback needs no memory: :mod:`hvd_compress.fused.top_k` does the
same for these in fewer passes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Hashable, Sequence
from typing import Any, ClassVar

import numpy as np

from hvd_compress.backends import numpy
from hvd_compress.base import Context, Sparse, Spec
from hvd_compress.codecs import logarithmic
from hvd_compress.fused.in_place import Arrays
from hvd_compress.fused.stages import StagedForm, StagedPlan
from hvd_compress.fused.top_k import finite_of, gather_of, merged, message_of, part_of, scattered
from hvd_compress.kernels import Column, Selection, Steps
from hvd_compress.kernels.codecs import all_finite
from hvd_compress.operators import Selector, top_k
from hvd_compress.operators.at_random import random_k, shared_generator
from hvd_compress.requests import Request, Sum
from hvd_compress.times import begin_phase


@dataclasses.dataclass(frozen=True, eq=False)
class FusedElements(StagedForm):
    """A form for whole buckets; see :class:`hvd_compress.fused.in_place.InPlaceForm`.

    Attributes:
        select: ``top_k``, which says how many elements of a tensor are sent, or another operator
            without a state, which finds them.
        values, indices: of the message.
    """

    sends_all: ClassVar[bool] = False

    select: Selector
    values: str | logarithmic
    indices: str

    def weight(self, context: Context) -> int | None:
        """Return how many elements are sent, if that is a part of them; or how many there are, if
        only the sender knows."""
        if self.is_known(context):
            return part_of(self.select, self.values, context)
        return math.prod(context.shape)

    def is_known(self, context: Context) -> bool:
        """Return whether options say how many elements are sent."""
        return self.select.count(1, context) is not None

    def plan(self, specs: Sequence[Spec], key: Hashable, step: Context) -> ElementsPlan:
        return ElementsPlan(self, specs, key, step)


class ElementsPlan(StagedPlan):
    form: FusedElements

    def __init__(
        self, form: FusedElements, specs: Sequence[Spec], key: Hashable, step: Context
    ) -> None:
        super().__init__(form, specs, key, step)
        is_known = form.is_known(step)
        self.counts = [k if is_known else None for k in self.weights]
        pairs = zip(self.sizes, self.weights, strict=True)
        self._selections: list[Selection] = []
        if isinstance(form.select, top_k):
            self._selections = [Selection([n], [k]) for n, k in pairs]
        self._message = message_of(form.values, form.indices, sum(self.sizes), self.counts)
        self.requests = [gather_of(self._message)]
        self._starts, self._longest = np.cumsum([0, *self.sizes[:-1]]), max(self.sizes)

    def meet(self, arrays: Arrays, step: Context) -> Generator[Request, Any, np.ndarray]:
        begin_phase("search")
        places, values = zip(*self._selected(arrays, step), strict=True)
        begin_phase("encode")
        indices = np.concatenate(
            [start + at for start, at in zip(self._starts, places, strict=True)]
        )
        frame, sent = self._message.encode(indices, np.concatenate(values))
        frames = yield self.requests[0].carrying([frame])
        begin_phase("add_up")
        with np.errstate(over="ignore", invalid="ignore"):
            theirs = [
                self._message.decode(frame, f"rank {rank}") for rank, frame in enumerate(frames)
            ]
            finite, views = finite_of(self.sizes, theirs), arrays.views
            counts = [at.size for at in places]
            arrays.counts = counts if None in self.counts else None
            parts = np.split(sent, np.cumsum(counts)[:-1])
            own = [Sparse(at, what) for at, what in zip(places, parts, strict=True)]
            for i, mean in enumerate(merged(self.sizes, theirs)):
                self.settle(
                    *(views, i, slice(0, self.sizes[i]), arrays.context(step, i)),
                    *(own[i] if finite[i] else None, scattered(*mean)),
                )
        return finite

    def _selected(self, arrays: Arrays, step: Context) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return places and values of the elements that are sent, of each tensor."""
        views, found = arrays.views, []
        with np.errstate(over="ignore", invalid="ignore"):
            for i, n in enumerate(self.sizes):
                its = arrays.context(step, i)._replace(name=self.names[i])
                x = self.passed_on(views, i, slice(0, n), its, self._longest)
                if self._selections:
                    found.append(self._selections[i].select(Steps(Column([x])))[:2])
                else:
                    if not all_finite(x):  # which the others must see, whatever is selected
                        x = np.full_like(x, np.nan)
                    at = self.form.select.select(x, self.counts[i], its)
                    found.append((at, x[at]))
        return found


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
