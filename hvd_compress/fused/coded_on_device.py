"""Codes of whole buckets in a device's memory, with the same messages and the same bits as on the
host.

All tensors of a bucket are copied end to end, and the device's ``Codes`` take them at once: what
its kernels need to be told is the same in every step.  Codes come to the host, and go into the
message there.  The host waits for the device twice: for codes, and for what it has to know of what
was added up; and once more where somebody else has written an owner's residuals.  States and
results are written at the end, where all ranks' values are finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context
from hvd_compress.fused.coded_plan import OWNED, CodedPlan, CodedStep
from hvd_compress.fused.in_place import Arrays
from hvd_compress.kernels import loops_of

_R = "residual"


class OfAllSteps(NamedTuple):
    """The places of tensors, of all runs and of the rank's own shards in arrays that these are end
    to end in; and the ``Codes`` of the module of the device's loops for each kind of runs."""

    tensors: list[slice]
    runs: list[slice]
    own: list[slice]
    codes: Any
    own_codes: Any


class StepOnDevice(CodedStep):
    """See :class:`hvd_compress.fused.coded_plan.CodedStep`."""

    _made: Any
    _left: Array = None

    @staticmethod
    def prepare(plan: CodedPlan, like: Array) -> OfAllSteps:
        def codes(runs: Sequence[Any], places: list[slice]) -> Any:
            return loops_of(like).Codes([plan.codecs[run.tensor] for run in runs], places, like)

        tensors, own = _end_to_end(plan.sizes), _end_to_end([run.size for run in plan.mine])
        starts = [tensors[run.tensor].start for run in plan.runs]
        pairs = zip(plan.runs, starts, strict=True)
        runs = [slice(start + run.own.start, start + run.own.stop) for run, start in pairs]
        own_codes = codes(plan.mine, own) if plan.mine else None
        return OfAllSteps(tensors, runs, own, codes(plan.runs, runs), own_codes)

    def __init__(self, plan: CodedPlan, arrays: Arrays, step: Context) -> None:
        super().__init__(plan, arrays, step)
        # What is coded, as one new array, but for what is foreign.
        self._base = joined(arrays.gradients)
        self._xp = backend_of(self._base)
        if self.stages.transforms:
            self._xp.add_scaled(self._base, joined(arrays.states[_R]), 1.0)

    def on_host(self, key: str) -> list[np.ndarray]:
        whole: np.ndarray = self._xp.to_numpy(joined(self.arrays.states[key]))
        return [whole[place] for place in self.plan.prepared.tensors]

    def from_host(self, x: np.ndarray) -> Array:
        return self._xp.from_numpy(x, self._base)

    def encode(self) -> Sequence[bool]:
        plan, x = self.plan, self._base
        if plan.foreign:
            x = self._xp.copy(x)
            for i, foreign in plan.foreign.items():
                self._xp.add_scaled(x[plan.prepared.tensors[i]], foreign, 1.0)
        self._made = plan.prepared.codes.encode(x, plan.randoms(plan.runs, self.step))
        found, notes = self._made.arrived()
        for code, its in zip(plan.codes, found, strict=True):
            code[:] = its
        fine: list[bool] = (notes[:, 0] == 0).tolist()
        return fine

    def add_up(
        self, codes: Sequence[Sequence[np.ndarray]], known: Sequence[bool]
    ) -> Sequence[tuple[bool, bool]]:
        plan, own = self.plan, self.plan.prepared.own_codes
        if own is None:
            return []
        self._left = left = joined(self._owned())
        for of_a_rank in zip(*codes, strict=True):
            own.decode(of_a_rank, left, add=True)
        made = own.encode(left, plan.randoms(plan.mine, self.step, 1))
        made.take_off(left)
        made.look(left)
        found, notes = made.arrived()
        for code, its in zip(plan.sums, found, strict=True):
            code[:] = its
        return [(not infinite, not is_left) for infinite, _, is_left in notes.tolist()]

    def _owned(self) -> list[Array]:
        """Return the rank's own shards of what owners have left out, views."""
        owned, mine = self.arrays.states[OWNED], self.plan.mine
        return [self._xp.reshape(owned[i], (-1,))[own] for i, own, _ in mine]

    def settle(
        self, codes: Sequence[Sequence[np.ndarray]], known: Sequence[bool], finite: list[bool]
    ) -> list[bool]:
        xp, plan, prepared = self._xp, self.plan, self.plan.prepared
        total = xp.full_like(self._base, 0.0)
        for of_a_rank in zip(*codes, strict=True):
            prepared.codes.decode(of_a_rank, total, add=plan.is_whole)
        for place, is_known in zip(prepared.runs, known, strict=True):
            if not is_known:
                total[place] = np.nan
        if plan.is_whole:
            finite = prepared.codes.finite(total).tolist()
        left = self._residual()
        gone = [i for i in plan.foreign if finite[i]]
        zeros = [xp.full_like(total[prepared.tensors[i]], 0.0) for i in gone]
        _, out, *_ = self.arrays.columns
        mean = xp.divided(total, plan.size)  # the last memory that is asked for
        if left is not None:
            self._write(self.arrays.states[_R], left, prepared.tensors, finite)
        xp.write_into(out.arrays, mean)
        for i, zero in zip(gone, zeros, strict=True):
            xp.write_into([self.arrays.states[OWNED][i]], zero)
            del plan.foreign[i]
        if plan.mine:
            fine = [finite[run.tensor] for run in plan.mine]
            self._write(self._owned(), self._left, prepared.own, fine)
        return finite

    def _residual(self) -> Array | None:
        """Return what is left of what this rank has coded, in the place of that."""
        xp, base, foreign = self._xp, self._base, self.plan.foreign
        if not self.stages.transforms:
            return None
        if not foreign:
            self._made.take_off(base)
            return base
        sent = xp.full_like(base, 0.0)
        self._made.decode(sent)
        for i, its in foreign.items():
            xp.add_scaled(sent[self.plan.prepared.tensors[i]], its, -1.0)
        return xp.add_scaled(base, sent, -1.0)

    def _write(
        self, to: Sequence[Array], x: Array, places: Sequence[slice], fine: Sequence[bool]
    ) -> None:
        """Write runs of ``x``, which they are end to end, into arrays, where that is fine."""
        if all(fine):
            self._xp.write_into(to, x)
            return
        for array, place, is_fine in zip(to, places, fine, strict=True):
            if is_fine:
                self._xp.write_into([array], x[place])


def joined(arrays: Sequence[Array]) -> Array:
    """Return arrays end to end, in new memory."""
    xp = backend_of(arrays[0])
    x = xp.end_to_end(arrays)
    return xp.copy(x) if len(arrays) == 1 else x


def _end_to_end(sizes: Sequence[int]) -> list[slice]:
    ends = np.cumsum(sizes).tolist()
    return [slice(end - n, end) for end, n in zip(ends, sizes, strict=True)]
