"""1-bit Adam, the optimizer (Tang et al., ICML 2021); its messages: ``methods/onebit_adam.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from hvd_compress.methods.onebit_adam import OneBitAdamCompression, check_freeze_step

from .frozen_adam import FrozenAdam, start_state, update_parameter
from .partner import loss_of


class OneBitAdam(FrozenAdam):
    """Adam whose variance is frozen after ``freeze_step`` steps, so that momentum can be sent in
    one bit an element::

        adam = hvd.OneBitAdam(model.parameters(), lr=1e-3, freeze_step=2000)
        optimizer = hvd.DistributedOptimizer(
            adam, named_parameters=model.named_parameters(), compression=adam.compressor()
        )

    With gradients g averaged over the ranks, and without a hat where ``bias_correction`` is off::

        m = beta1 m + (1 - beta1) g
        v = beta2 v + (1 - beta2) g^2                       until freeze_step, not later
        p = p - lr (m^ / (sqrt(v^) + eps) + weight_decay p)

    After ``freeze_step`` the exchange returns the new m instead of g, equal on all ranks.
    Elements that had no gradient until then have v = 0 and no scale: they stay where they are,
    but for decay, since one bit cannot say that their momentum is zero.

    Without this package's compression, the same steps are taken with gradients that are averaged
    otherwise, or of one process.

    State of a parameter: ``exp_avg`` m, ``exp_avg_sq`` v, ``step`` and ``variance_step``, the
    number of updates of each; all equal on all ranks.  Gradients of some rows travel as they are,
    and their momentum is exact.

    Args:
        params: as for every optimizer; a group may have options of its own, all but beta1 and
            ``freeze_step``.
        lr, betas, eps: of Adam.
        weight_decay: decoupled from the gradient, as in AdamW.
        freeze_step: see above.
        bias_correction: divide m by ``1 - beta1^step`` and v by ``1 - beta2^variance_step``, as
            ``torch.optim.AdamW`` does, so that freezing early does not lengthen the steps.

    Differs from the released code in: bias correction, which that lacks (``bias_correction=False``
    is its formula); the elements without variance, for which it asks the user for a mask; there
    is no dummy step.

    Raises:
        ConfigError: an option makes no sense.
    """

    method = OneBitAdamCompression
    schedule = ("freeze_step",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        freeze_step: int = 100_000,
        bias_correction: bool = True,
    ) -> None:
        # The compression alone would take epochs as well.
        check_freeze_step(freeze_step)
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            freeze_step=freeze_step,
            bias_correction=bias_correction,
        )

    def compression_options(self, group: dict[str, Any]) -> dict[str, Any]:
        return {"beta1": group["betas"][0], **super().compression_options(group)}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step along the gradients, or along the momenta that came instead of them."""
        loss = loss_of(closure)
        binding = self._binding()
        ours = binding is not None
        # Steps may have been skipped after their exchange: the compression's count is what counts.
        frozen = ours and binding.method.frozen(binding.step - 1, binding.epoch)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = start_state(self, p)
                if not ours:
                    frozen = state["step"] >= group["freeze_step"]
                is_momentum = ours and frozen and p not in binding.sparse
                gradient = p.grad.to_dense() if p.grad.is_sparse else p.grad
                self.update(p, gradient, state, group, frozen, is_momentum)
        return loss

    def update(
        self,
        p: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
        frozen: bool,
        is_momentum: bool,
    ) -> None:
        """Take one step of one parameter; see :func:`~.frozen_adam.direction`."""
        update_parameter(p, gradient, state, group, frozen, is_momentum)
