"""Codes of whole buckets in a device's memory, with the same messages and the same bits as on the
host: messages are written where they are sent from, and read where they arrive."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from typing import Any

from hvd_compress.base import Array, Context, Spec
from hvd_compress.fused.coded_plan import OWNED, CodedPlan, Message
from hvd_compress.fused.in_place import Arrays
from hvd_compress.fused.on_device import carried
from hvd_compress.kernels import loops_of
from hvd_compress.requests import Alltoall, Collective, Gather, Request
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
        if owned is None:
            request: Collective = Gather(frames[0], equal_sizes=True)
            arriving = self.messages * self.size
            arrived = yield from self._carried(request, frames, self.messages, arriving, step)
        else:
            request, arriving = Alltoall(frames), [self.messages[self.rank]] * self.size
            arrived = yield from self._carried(request, frames, self.messages, arriving, step)
            with phase("add_up"):
                reply = self._step.add_up(arrived, owned, self.randoms(self.mine, step, 1))
            request, sent = Gather(reply, self.equal_sizes), [self.replies[self.rank]]
            arrived = yield from self._carried(request, [reply], sent, self.replies, step)
        with phase("add_up"):
            self._step.settle(arrived, out, residuals, owned)
        # Where that is not so, states are those of before already.
        return [True] * len(self.sizes)

    def _carried(
        self,
        request: Collective,
        frames: Sequence[Array],
        sent: Sequence[Message],
        arriving: Sequence[Message],
        step: Context,
    ) -> Generator[Request, Any, Array]:
        """Return what arrives, given the layouts of what is sent and of what arrives."""
        seals, checks = ([m.seal for m in sent], [m.opened for m in arriving])
        return (yield from carried(request, frames, seals, checks, step))
