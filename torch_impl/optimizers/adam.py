"""1-bit Adam and 1-bit LAMB for PyTorch."""

from __future__ import annotations

import torch

from hvd_compress import optimizers
from hvd_compress.optimizers import Formula

from ..optimizer_host import PartnerOptimizer


class OneBitAdam(PartnerOptimizer):
    """1-bit Adam::

        adam = hvd.OneBitAdam(model.parameters(), lr=1e-3, freeze_step=2000)
        optimizer = hvd.DistributedOptimizer(
            adam, named_parameters=model.named_parameters(), compression=adam.compressor()
        )

    A group may have options of its own, all but beta1 and ``freeze_step``.
    """

    formula = optimizers.OneBitAdam

    def update(self, p: torch.Tensor, formula: Formula, **flags: bool) -> None:
        binding = self.binding
        if binding is None:
            frozen = self.state[p].get("step", 0) >= formula.freeze_step  # type: ignore[attr-defined]
            super().update(p, formula, frozen=frozen)
            return
        # Steps may have been skipped after their exchange: the compression's count is what counts.
        frozen = binding.method.frozen(binding.step - 1, binding.epoch)
        super().update(p, formula, frozen=frozen, is_momentum=frozen and p not in binding.sparse)


class OneBitLAMB(OneBitAdam):
    """1-bit LAMB::

        lamb = hvd.OneBitLAMB(model.parameters(), lr=2e-3, freeze_step=2000)
        optimizer = hvd.DistributedOptimizer(
            lamb, named_parameters=model.named_parameters(), compression=lamb.compressor()
        )

    A group may have options of its own, as for :class:`OneBitAdam`.
    """

    formula = optimizers.OneBitLAMB
