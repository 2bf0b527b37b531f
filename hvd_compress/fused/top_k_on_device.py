"""Top-k of whole buckets in a device's memory: the message is written where it is sent from, and
read where it arrives.

The result is that of :mod:`hvd_compress.fused.top_k`, to the bit.  The message is another: its size
is known beforehand, and all its parts can be read at the same time.  Places are those within blocks
(:class:`hvd_compress.torch.triton.loops.BlockMessage`).  Whether all ranks'
values are finite is found out on the device, and decides there whether states become the new ones.
So the host waits for nothing where the engine reads the device's memory, and else for the message.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from typing import Any

from hvd_compress.base import Array, Context, Spec
from hvd_compress.fused.in_place import Arrays, InPlacePlan
from hvd_compress.fused.on_device import gathered
from hvd_compress.kernels import loops_of
from hvd_compress.requests import Request
from hvd_compress.times import begin_phase


class TopKOnDevice(InPlacePlan):
    """The plan of a bucket; see :mod:`hvd_compress.fused.top_k_on_device`."""

    def __init__(self, form: Any, specs: Sequence[Spec], key: Hashable, step: Context) -> None:
        super().__init__(form, specs, key, step)
        self.keys, like = form.keys, specs[0].x
        self._step = loops_of(like).TopKStep(self.sizes, self.weights, form.values, like)

    def results_for(
        self, x: Sequence[Array], dtypes: Sequence[str], step: Context
    ) -> Sequence[Array]:
        if set(dtypes) == {"float32"}:
            return super().results_for(x, dtypes, step)
        return [self.empty(each) for each in x]  # gradients are read after results are known

    def meet(self, arrays: Arrays, step: Context) -> Generator[Request, Any, None]:
        form = self.form
        begin_phase("search")
        momenta = form.momenta_in_use(arrays.momenta)
        message = self._step.encode(arrays.columns, momenta, form.nesterov)
        layout = self._step.layout
        seal, checks = layout.header.seal, [layout.opened] * self.size
        everything = yield from gathered(message, seal, checks, step)
        begin_phase("add_up")
        dtypes = None if set(arrays.dtypes) == {"float32"} else arrays.dtypes
        masking = form.correction is not None and form.correction.masking
        self._step.settle(arrays.columns, everything, self.size, masking, dtypes)
