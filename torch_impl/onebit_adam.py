"""1-bit Adam, the optimizer (Tang et al., ICML 2021); its messages: ``methods/onebit_adam.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from hvd_compress.errors import ConfigError
from hvd_compress.methods.onebit_adam import OneBitAdamCompression, check_freeze_step


def check_adam(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Raise ``ConfigError`` unless these are options of Adam."""
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(f"betas must be two numbers in [0, 1); got {betas!r}")
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not value >= 0:
            raise ConfigError(f"{name} must be 0 or more; got {value!r}")


class OneBitAdam(torch.optim.Optimizer):
    """Adam whose variance is frozen after ``freeze_step`` steps, so that momentum can travel in one
    bit an element::

        adam = hvd.OneBitAdam(model.parameters(), lr=1e-3, freeze_step=2000)
        optimizer = hvd.DistributedOptimizer(
            adam, named_parameters=model.named_parameters(), compression=adam.compressor()
        )

    With gradients g averaged over the ranks, and without a hat where ``bias_correction`` is off::

        m = beta1 m + (1 - beta1) g
        v = beta2 v + (1 - beta2) g^2                       until freeze_step, not later
        p = p - lr (m^ / (sqrt(v^) + eps) + weight_decay p)

    After ``freeze_step`` the exchange hands out the new m instead of g, equal on all ranks.
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
        check_adam(lr, betas, eps, weight_decay)
        check_freeze_step(freeze_step)
        # Horovod makes its optimizer from the parameter groups alone: all options are there.
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": tuple(betas),
                "eps": eps,
                "weight_decay": weight_decay,
                "freeze_step": freeze_step,
                "bias_correction": bias_correction,
            },
        )

    def compressor(self, **options: Any) -> OneBitAdamCompression:
        """The compression that goes with this optimizer; ``options`` are its ``norm`` and
        ``min_size``."""
        return OneBitAdamCompression(**self.compression_options(self.param_groups[0]), **options)

    def compression_options(self, group: dict[str, Any]) -> dict[str, Any]:
        """Those of the compression that a parameter group determines."""
        return {"beta1": group["betas"][0], "freeze_step": group["freeze_step"]}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step along the gradients, or along the momenta that came instead of them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        binding: Any = getattr(self, "compression", None)
        ours = binding is not None and isinstance(binding.method, OneBitAdamCompression)
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
                update_parameter(p, gradient, state, group, frozen, is_momentum)
        return loss


def start_state(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> dict[str, Any]:
    """Of a parameter, made where it is missing."""
    state = optimizer.state[p]
    if "exp_avg" not in state:
        state["step"] = state["variance_step"] = 0
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = torch.zeros_like(p, memory_format=torch.preserve_format)
    return state


def update_parameter(
    p: torch.Tensor,
    gradient: torch.Tensor,
    state: dict[str, Any],
    group: dict[str, Any],
    frozen: bool,
    is_momentum: bool = False,
) -> None:
    """One step of Adam.

    Args:
        frozen: the variance stays as it is.
        is_momentum: ``gradient`` is the new momentum.
    """
    (beta1, beta2), m = group["betas"], state["exp_avg"]
    state["step"] += 1
    if is_momentum:
        m.copy_(gradient)
    else:
        m.mul_(beta1).add_(gradient, alpha=1 - beta1)
    if not frozen:
        state["variance_step"] += 1
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    update = m / scale_of(state, group)
    if group["bias_correction"]:
        update /= 1 - beta1 ** state["step"]
    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])


def scale_of(state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
    """sqrt(v) + eps, what momentum is divided by; infinite where v is 0, and nothing is known."""
    v = state["exp_avg_sq"]
    if group["bias_correction"] and state["variance_step"]:
        v = v / (1 - group["betas"][1] ** state["variance_step"])
    return v.sqrt().add_(group["eps"]).masked_fill_(v == 0, torch.inf)
