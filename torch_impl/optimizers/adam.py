"""1-bit Adam and 1-bit LAMB for PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from hvd_compress import optimizers

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

    _frozen: bool | None

    def begin_step(self) -> None:
        binding = self.binding
        # Steps may have been skipped after their exchange: the compression's count is what counts.
        ours = binding is not None
        self._frozen = binding.method.frozen(binding.step - 1, binding.epoch) if ours else None

    def update(self, p: torch.Tensor, formula: Any, **flags: bool) -> None:
        if self._frozen is None:
            frozen = self.state[p].get("step", 0) >= formula.freeze_step
            super().update(p, formula, frozen=frozen)
        else:
            is_momentum = self._frozen and p not in self.binding.store.sparse
            super().update(p, formula, frozen=self._frozen, is_momentum=is_momentum)


class OneBitLAMB(OneBitAdam):
    """1-bit LAMB::

        lamb = hvd.OneBitLAMB(model.parameters(), lr=2e-3, freeze_step=2000)
        optimizer = hvd.DistributedOptimizer(
            lamb, named_parameters=model.named_parameters(), compression=lamb.compressor()
        )

    A group may have options of its own, as for :class:`OneBitAdam`.
    """

    formula = optimizers.OneBitLAMB
