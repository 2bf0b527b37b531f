"""LARS, LAMB, 1-bit Adam and 1-bit LAMB for PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from hvd_compress import optimizers

from ..state.optimizer_host import FormulaOptimizer, PartnerOptimizer


class LARS(FormulaOptimizer):
    """SGD with momentum at large batches, with a learning rate for each layer::

        lars = hvd.LARS(model.parameters(), lr=3.2)
        optimizer = hvd.DistributedOptimizer(lars, compression=hvd.FP16)

    Its momentum stays with it under a compression that takes momentum over, as DGC does.

    >>> w = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
    >>> lars = hvd.LARS([w], lr=3.2)
    >>> optimizer = hvd.DistributedOptimizer(lars, compression=hvd.TopK(density=0.5))
    >>> (w * torch.tensor([0.6, 0.8])).sum().backward()
    >>> optimizer.step()
    >>> w.detach()  # the larger half of the gradient was sent
    tensor([[3.0000, 3.9840]])
    """

    formula = optimizers.LARS


class LAMB(FormulaOptimizer):
    """Adam at large batches, with a learning rate for each layer::

        lamb = hvd.LAMB(model.parameters(), lr=2e-3)
        optimizer = hvd.DistributedOptimizer(lamb, compression=hvd.FP16)

    Give biases a group with ``weight_decay=0``.

    >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> lamb = hvd.LAMB([w], lr=2e-3, weight_decay=0.01)
    >>> optimizer = hvd.DistributedOptimizer(lamb, compression=hvd.FP16)
    >>> (w * torch.tensor([0.6, 0.8])).sum().backward()
    >>> optimizer.step()
    >>> w.detach()
    tensor([2.9930, 3.9929])
    """

    formula = optimizers.LAMB


class OneBitAdam(PartnerOptimizer):
    """AdamW that sends its momentum in one bit per element once its variance has settled::

        adam = hvd.OneBitAdam(model.parameters(), lr=1e-3, freeze_step=20_000)
        optimizer = hvd.DistributedOptimizer(adam, compression=adam.compressor())

    A group may have options of its own, all but beta1 and ``freeze_step``.

    >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> adam = hvd.OneBitAdam([w], lr=0.1, freeze_step=1)
    >>> optimizer = hvd.DistributedOptimizer(adam, compression=adam.compressor())
    >>> for _ in range(2):
    ...     optimizer.zero_grad()
    ...     (w * torch.tensor([0.6, 0.8])).sum().backward()
    ...     optimizer.step()
    >>> w.detach()
    tensor([2.8000, 3.8000])
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
    """LAMB that sends its momentum in one bit per element once its variance has settled::

        lamb = hvd.OneBitLAMB(model.parameters(), lr=1e-3, freeze_step=20_000)
        optimizer = hvd.DistributedOptimizer(lamb, compression=lamb.compressor())

    A group may have options of its own, as for :class:`OneBitAdam`.

    >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> lamb = hvd.OneBitLAMB([w], lr=0.1, freeze_step=1)
    >>> optimizer = hvd.DistributedOptimizer(lamb, compression=lamb.compressor())
    >>> for _ in range(2):
    ...     optimizer.zero_grad()
    ...     (w * torch.tensor([0.6, 0.8])).sum().backward()
    ...     optimizer.step()
    >>> w.detach()
    tensor([2.3282, 3.3282])
    """

    formula = optimizers.OneBitLAMB
