"""Selected elements of what any elementwise transforms make of the tensors of a bucket.

A chain of such transforms, EF21 say, and an allgather of the largest elements, or of those beyond a
threshold, treats a bucket at once.  Its blocks treat one tensor after the other, with the same
bits; tests hold the two equal.  The result of momentum correction and error feedback needs no
memory: :mod:`hvd_compress.fused.top_k` does the same for these in fewer passes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Hashable, Sequence
from typing import Any, ClassVar

import numpy as np

from hvd_compress.base import Context, Sparse, Spec
from hvd_compress.codecs import logarithmic
from hvd_compress.fused.in_place import Arrays
from hvd_compress.fused.messages import finite_of, gather_of, merged, message_of, part_of, scattered
from hvd_compress.fused.stages import StagedForm, StagedPlan
from hvd_compress.kernels import Column, Selection, Steps
from hvd_compress.kernels.codecs import all_finite
from hvd_compress.operators import Selector, top_k
from hvd_compress.requests import Request
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
    """The plan of a bucket; see :mod:`hvd_compress.fused.elements`."""

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
