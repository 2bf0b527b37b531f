"""Codes of whole buckets in host memory: in the loops of :mod:`hvd_compress.kernels.codecs`.

Where all that a chain does is to feed back what codes leave out, residuals become the new ones in
the pass that codes them; the old ones are kept where the results will be until all ranks' values
are known to be finite.  Else the gradient and this rank's own codes are kept, and states are
written then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvd_compress.base import Array, Context
from hvd_compress.fused.coded_plan import OWNED, CodedPlan, CodedStep, Run
from hvd_compress.fused.in_place import Arrays, Views, room
from hvd_compress.fused.kept import overlap
from hvd_compress.fused.stages import Sent
from hvd_compress.kernels import Column, threads


class StepOnHost(CodedStep):
    """See :class:`hvd_compress.fused.coded_plan.CodedStep`."""

    def __init__(self, plan: CodedPlan, arrays: Arrays, step: Context) -> None:
        super().__init__(plan, arrays, step)
        #: where old residuals are, if the new ones are in their places already, and of which runs
        #: of each tensor they are: most often in the place of the gradients
        self._kept: list[np.ndarray] | None = None
        self._fed: dict[int, list[slice]] = {}

    @staticmethod
    def prepare(plan: CodedPlan, like: Array) -> list[np.ndarray]:
        """Return memory for the sums of the rank's own shards, and what their codes leave out."""
        return [np.empty(run.size, np.float32) for run in plan.mine]

    def on_host(self, key: str) -> list[np.ndarray]:
        return self.arrays.views.states[key]

    def from_host(self, x: np.ndarray) -> Array:
        return x

    def encode(self) -> list[bool]:
        plan, views, n = self.plan, self.arrays.views, threads()
        if self.stages.only_feeds_back and not plan.foreign:
            kept = views.out
            if overlap(Column(kept, plan.sizes)):  # what is kept of one would be another's gradient
                kept = [np.empty_like(x) for x in kept]
            self._kept, (key,) = kept, self.stages.keys
        fine = []
        with np.errstate(over="ignore", invalid="ignore"):
            each = zip(plan.runs, plan.codes, plan.randoms(plan.runs, self.step), strict=True)
            for (i, own, _), code, random in each:
                if self._kept is None:
                    its = self.arrays.context(self.step, i)
                    x = plan.passed_on(views, i, own, its, plan.longest)
                    if i in plan.foreign:
                        x = x + plan.foreign[i][own]
                    is_fine = plan.codecs[i].put(x, random, code)
                else:
                    left, feed = views.states[key][i][own], plan.bound[i].feed
                    x, old = views.x[i][own], self._kept[i][own]
                    is_fine, _ = feed(left, x, old, [], random, left, code, n)
                    self._fed.setdefault(i, []).append(own)
                fine.append(is_fine)
        return fine

    def add_up(
        self, codes: Sequence[Sequence[np.ndarray]], known: Sequence[bool]
    ) -> list[tuple[bool, bool]]:
        plan, views, n, found = self.plan, self.arrays.views, threads(), []
        randoms, sums = plan.randoms(plan.mine, self.step, 1), (plan.prepared, plan.sums)
        rows = zip(plan.mine, codes, known, self._owned(views), randoms, *sums, strict=True)
        with np.errstate(over="ignore", invalid="ignore"):
            for (i, _, _), theirs, is_known, base, random, left, code in rows:
                its = False, False
                if is_known:
                    feed = plan.bound[i].feed
                    its = feed(base, None, None, theirs, random, left, code, n)
                found.append(its)
        return found

    def _owned(self, views: Views) -> list[np.ndarray]:
        """Return the rank's own shards of what owners have left out, views."""
        return [views.states[OWNED][i][own] for i, own, _ in self.plan.mine]

    def settle(
        self, codes: Sequence[Sequence[np.ndarray]], known: Sequence[bool], finite: list[bool]
    ) -> list[bool]:
        plan, views, n, by = self.plan, self.arrays.views, threads(), np.float32(self.plan.size)
        is_fed = self._kept is not None
        settles = not is_fed and bool(self.stages.transforms)
        # States, and what is kept of them where the result will be, wait for the sum of all ranks.
        is_late = plan.is_whole and (is_fed or settles)
        totals = room(plan.longest)[0] if is_late else views.out[0]
        if not plan.is_whole:
            for i in [i for i in self._fed if not finite[i]]:
                self._put_back(i)
            self._fed.clear()
        rows = zip(plan.runs, plan.codes, codes, known, strict=True)
        with np.errstate(over="ignore", invalid="ignore"):
            for run, code, theirs, is_known in rows:
                (i, own, _), mean = run, plan.bound[run.tensor].mean
                out = views.out[i][own]
                write: Callable[[np.ndarray], Any]
                if settles and not plan.is_whole:
                    write = functools.partial(_write, mean, theirs, is_known, plan.size, n)
                else:
                    total = totals[: out.size] if is_late else out
                    if is_known:
                        fine = mean(theirs, 1 if is_late else plan.size, total, plan.is_whole, n)
                    else:
                        fine = False
                        total.fill(np.nan)
                    finite[i] = fine if plan.is_whole else finite[i]
                    write = functools.partial(np.divide, total, by)
                if settles:
                    sent = self._sent(run, code) if finite[i] else None
                    plan.settle(views, i, own, self.arrays.context(self.step, i), sent, write)
                elif is_late:
                    if not finite[i]:
                        self._put_back(i)
                    self._fed.pop(i, None)
                    write(out)
        if plan.is_whole:
            return finite
        for i in [i for i in plan.foreign if finite[i]]:
            del plan.foreign[i]
            views.states[OWNED][i].fill(0)
        of_mine = zip(plan.mine, self._owned(views), plan.prepared, strict=True)
        for run, owned, left in of_mine:
            if finite[run.tensor]:
                owned[:] = left
        return finite

    def _sent(self, run: Run, code: np.ndarray) -> Sent:
        """Return what was sent of a run, as this code."""
        plan, (i, own, _) = self.plan, run
        codec = plan.codecs[i]
        if i not in plan.foreign and self.stages.only_feeds_back:
            return functools.partial(codec.take_off, code)
        sent = room(plan.longest)[1, : run.size]
        codec.decode_to(code, sent)
        if i in plan.foreign:
            sent -= plan.foreign[i][own]
        return sent

    def _put_back(self, tensor: int) -> None:
        """Let a tensor have its old residual."""
        assert self._kept is not None
        (key,) = self.stages.keys
        for own in self._fed.pop(tensor):
            np.copyto(self.arrays.views.states[key][tensor][own], self._kept[tensor][own])

    def undo(self) -> None:
        for tensor in list(self._fed):
            self._put_back(tensor)


def _write(mean: Any, codes: Any, is_known: bool, by: int, n: int, out: np.ndarray) -> None:
    """Write what the code of a shard means, divided by a number, if it means any."""
    if is_known:
        mean(codes, by, out, False, n)
    else:
        out.fill(np.nan)
