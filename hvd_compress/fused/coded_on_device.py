"""Codes of whole buckets in a device's memory, with the same messages and the same bits as on the
host.  Messages are written where they are sent from, and read where they arrive."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from typing import Any

from hvd_compress.backends import backend_of
from hvd_compress.base import Context, Spec
from hvd_compress.fused.coded_plan import OWNED, CodedPlan
from hvd_compress.fused.in_place import Arrays
from hvd_compress.fused.on_device import gathered, scattered
from hvd_compress.kernels import loops_of
from hvd_compress.requests import Request
from hvd_compress.times import begin_phase


class CodedOnDevice(CodedPlan):
    """The plan of a bucket in a device's memory."""

    def __init__(
        self, form: Any, specs: Sequence[Spec], key: Hashable, step: Context, *which: Any
    ) -> None:
        super().__init__(form, specs, key, step, *which)
        like = specs[0].x
        loops = loops_of(like)
        self._step, self._joined = loops.CodesStep(self, like), loops.joined

    def meet(self, arrays: Arrays, step: Context) -> Generator[Request, Any, None]:
        try:
            yield from self._met(arrays, step)
        finally:
            self._step.forget()

    def _met(self, arrays: Arrays, step: Context) -> Generator[Request, Any, None]:
        xp, work, stages = backend_of(arrays.gradients[0]), self._step, self.form.stages
        x, out, *states = arrays.columns
        columns = dict(zip(self.keys, states, strict=True))
        owned = columns.pop(OWNED, None)
        begin_phase("encode")
        if owned is not None:
            self.look(owned.arrays)
        parts, whole = self._parts(arrays, step), self._joined(x.arrays)
        own = {key: self._joined(column.arrays) for key, column in columns.items()}
        updated = [
            stages.updated(whole[at], {key: state[at] for key, state in own.items()}, context)
            for at, context in parts
        ]
        passed_on, kept = xp.end_to_end([x for x, _ in updated]), [its for _, its in updated]
        frames = work.encode(passed_on, self.randoms(self.runs, step))
        del whole, own, updated, passed_on
        seals, checks = [m.seal for m in self.messages], [m.opened for m in self.replies]
        if owned is None:
            arrived = yield from gathered(frames[0], seals[0], checks * self.size, step)
        else:
            check = self.messages[self.rank].opened
            arrived = yield from scattered(frames, seals, check, step)
            begin_phase("add_up")
            reply = work.add_up(arrived, owned, self.randoms(self.mine, step, 1))
            seal = self.replies[self.rank].seal
            arrived = yield from gathered(reply, seal, checks, step, self.equal_sizes)
        begin_phase("add_up")
        mean = work.mean(arrived)
        xp.write_into(out.arrays, mean)
        if stages.transforms:
            sent = work.sent()
            rows = zip(parts, kept, strict=True)
            found = [
                stages.settled(sent[at], its, mean[at], context) for (at, context), its in rows
            ]
            if stages.finishes:
                work.write("out", out, xp.end_to_end([direction for direction, _ in found]), False)
            for key, column in columns.items():
                work.write(key, column, xp.end_to_end([its[key] for _, its in found]))
        if owned is not None:
            work.write_owned(owned)

    def _parts(self, arrays: Arrays, step: Context) -> list[tuple[slice, Context]]:
        """Return the parts of the tensors end to end that transforms take at once, with their
        circumstances.  These are all of them, or each tensor if tensors have momenta of their
        own."""
        if len(set(arrays.momenta)) == 1:
            whole = slice(0, self._step.tensors[-1].stop)
            return [(whole, arrays.context(step, 0))]
        return [(at, arrays.context(step, i)) for i, at in enumerate(self._step.tensors)]
