"""Codes of whole buckets in a device's memory, with the same messages and the same bits as on the
host: messages are written where they are sent from, and read where they arrive."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from typing import Any

from hvd_compress.base import Context, Spec
from hvd_compress.fused.coded_plan import OWNED, CodedPlan
from hvd_compress.fused.in_place import Arrays
from hvd_compress.fused.on_device import gathered, scattered
from hvd_compress.kernels import loops_of
from hvd_compress.requests import Request
from hvd_compress.times import phase

_R = "residual"


class CodedOnDevice(CodedPlan):
    """The plan of a bucket in a device's memory."""

    def __init__(
        self, form: Any, specs: Sequence[Spec], key: Hashable, step: Context, *which: Any
    ) -> None:
        super().__init__(form, specs, key, step, *which)
        like = specs[0].x
        self._step = loops_of(like).CodesStep(self, bool(form.stages.transforms), like)

    def meet(self, arrays: Arrays, step: Context) -> Generator[Request, Any, list[bool]]:
        x, out, *states = arrays.columns
        columns = dict(zip(self.keys, states, strict=True))
        residuals, owned = columns.get(_R), columns.get(OWNED)
        with phase("encode"):
            if owned is not None:
                self.look(owned.arrays)
            frames = self._step.encode(x, residuals, self.randoms(self.runs, step))
        seals, checks = [m.seal for m in self.messages], [m.opened for m in self.replies]
        if owned is None:
            arrived = yield from gathered(frames[0], seals[0], checks * self.size, step)
        else:
            check = self.messages[self.rank].opened
            arrived = yield from scattered(frames, seals, check, step)
            with phase("add_up"):
                reply = self._step.add_up(arrived, owned, self.randoms(self.mine, step, 1))
            seal = self.replies[self.rank].seal
            arrived = yield from gathered(reply, seal, checks, step, self.equal_sizes)
        with phase("add_up"):
            self._step.settle(arrived, out, residuals, owned)
        # Where that is not so, states are those of before already.
        return [True] * len(self.sizes)
