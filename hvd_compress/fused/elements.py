"""Elements that are selected, or drawn by all ranks alike, of what elementwise transforms make of
the tensors of a bucket.

Such transforms are EF21's, say.  The elements are the largest, or those beyond a threshold, which
all ranks gather; or drawn ones, which they add up.  A chain of these treats a bucket at once.  Its
blocks treat one tensor after the other, with the same bits; tests hold the two equal.  The result
of momentum correction and error feedback needs no memory: :mod:`hvd_compress.fused.top_k` does the
same for these in fewer passes.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Generator, Hashable, Sequence
from typing import Any, ClassVar

import numpy as np

from hvd_compress.backends import numpy
from hvd_compress.base import Context, Sparse, Spec
from hvd_compress.codecs import Selector, logarithmic, top_k
from hvd_compress.codecs.at_random import random_k, shared_generator
from hvd_compress.fused.in_place import Arrays
from hvd_compress.fused.stages import StagedForm, StagedPlan
from hvd_compress.fused.top_k import (
    Entries,
    finite_of,
    gather_of,
    merged,
    message_of,
    part_of,
)
from hvd_compress.kernels import Column, Steps, TopKSelection
from hvd_compress.kernels.codecs import all_finite
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


class SomePlan(StagedPlan):
    """The plan of a bucket of whose tensors some elements are sent."""

    @abc.abstractmethod
    def pick(self, i: int, x: np.ndarray, its: Context) -> tuple[np.ndarray, np.ndarray]:
        """Return places and values of the elements of tensor ``i`` that are sent, given what is
        passed on of it.  If that is not finite, neither are the values, whatever is picked."""

    def picked(self, arrays: Arrays, step: Context) -> tuple[Sequence[np.ndarray], ...]:
        """Return places and values of the elements that are sent, of each tensor."""
        begin_phase("search")
        found, longest = [], max(self.sizes)
        with np.errstate(over="ignore", invalid="ignore"):
            for i, n in enumerate(self.sizes):
                its = arrays.context(step, i)._replace(name=self.names[i])
                x = self.passed_on(arrays.views, i, slice(0, n), its, longest)
                found.append(self.pick(i, x, its))
        return tuple(zip(*found, strict=True))

    def settle_all(
        self,
        arrays: Arrays,
        step: Context,
        places: Sequence[np.ndarray],
        sent: np.ndarray,
        finite: Sequence[bool] | np.ndarray,
        means: Sequence[Entries],
    ) -> None:
        """Write averages and states, given what was sent at these places, end to end, and the
        elements of each average."""
        own = np.split(sent, np.cumsum([at.size for at in places])[:-1])
        rows = zip(self.sizes, places, own, finite, means, strict=True)
        with np.errstate(over="ignore", invalid="ignore"):
            for i, (n, at, what, fine, mean) in enumerate(rows):
                self.settle(
                    *(arrays.views, i, slice(0, n), arrays.context(step, i)),
                    *(Sparse(at, what) if fine else None, functools.partial(_scatter, *mean)),
                )


def _scatter(places: np.ndarray, values: np.ndarray, out: np.ndarray) -> None:
    """Write an array with these elements, and zeros elsewhere."""
    out.fill(0)
    out[places] = values


class ElementsPlan(SomePlan):
    form: FusedElements

    def __init__(
        self, form: FusedElements, specs: Sequence[Spec], key: Hashable, step: Context
    ) -> None:
        super().__init__(form, specs, key, step)
        is_known = form.is_known(step)
        self.counts = [k if is_known else None for k in self.weights]
        pairs = zip(self.sizes, self.weights, strict=True)
        self._selections: list[TopKSelection] = []
        if isinstance(form.select, top_k):
            self._selections = [TopKSelection([n], [k]) for n, k in pairs]
        self._message = message_of(form.values, form.indices, sum(self.sizes), self.counts)
        self.requests = [gather_of(self._message)]
        self._starts = np.cumsum([0, *self.sizes[:-1]])

    def meet(self, arrays: Arrays, step: Context) -> Generator[Request, Any, np.ndarray]:
        places, values = self.picked(arrays, step)
        begin_phase("encode")
        indices = [start + at for start, at in zip(self._starts, places, strict=True)]
        frame, sent = self._message.encode(np.concatenate(indices), np.concatenate(values))
        frames = yield gather_of(self._message, frame)
        begin_phase("add_up")
        theirs = [self._message.decode(frame, f"rank {rank}") for rank, frame in enumerate(frames)]
        finite = finite_of(self.sizes, theirs)
        arrays.counts = [at.size for at in places] if None in self.counts else None
        self.settle_all(arrays, step, places, sent, finite, merged(self.sizes, theirs))
        return finite

    def pick(self, i: int, x: np.ndarray, its: Context) -> tuple[np.ndarray, np.ndarray]:
        if self._selections:
            return self._selections[i].select(Steps(Column([x])))[:2]
        x = x if all_finite(x) else np.full_like(x, np.nan)
        at = self.form.select.select(x, self.counts[i], its)
        return at, x[at]


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


class DrawnPlan(SomePlan):
    form: FusedDrawn

    def __init__(
        self, form: FusedDrawn, specs: Sequence[Spec], key: Hashable, step: Context
    ) -> None:
        super().__init__(form, specs, key, step)
        self._values = np.empty(sum(self.weights), np.float32)
        self.requests = [Sum(self._values, form.wire, form.algorithm)]

    def meet(self, arrays: Arrays, step: Context) -> Generator[Request, Any, list[bool]]:
        places, values = self.picked(arrays, step)
        begin_phase("encode")
        np.concatenate(values, out=self._values)
        total = yield self.requests[0]
        begin_phase("add_up")
        with np.errstate(over="ignore", invalid="ignore"):
            mean = np.split(total / np.float32(self.size), np.cumsum(self.weights)[:-1])
        finite = [bool(np.isfinite(x).all()) for x in mean]
        sent, pairs = numpy.round_to(self._values, self.form.wire), zip(places, mean, strict=True)
        self.settle_all(arrays, step, places, sent, finite, [*pairs])
        return finite

    def pick(self, i: int, x: np.ndarray, its: Context) -> tuple[np.ndarray, np.ndarray]:
        at = self.form.select.draw(x.size, self.weights[i], shared_generator(its))
        values = x[at] if all_finite(x) else np.full(at.size, np.nan, np.float32)
        return at, values * np.float32(x.size / at.size) if self.form.unbiased else values
