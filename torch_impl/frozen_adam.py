"""The base class of the optimizers that freeze Adam's variance, for PyTorch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hvd_compress.errors import ConfigError

from .partner import PartnerOptimizer


class FrozenAdam(PartnerOptimizer):
    """Adam with its own compression.  Subclasses define in which steps its variance is updated."""

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        check_adam(options["lr"], options["betas"], options["eps"], options["weight_decay"])
        options["betas"] = tuple(options["betas"])
        self.method(**self.compression_options(options))  # checks the rest
        # Horovod makes its optimizer from the parameter groups alone: all options are there.
        super().__init__(params, options)


def check_adam(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Raise ``ConfigError`` unless these are options of Adam."""
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(f"betas must be two numbers in [0, 1); got {betas!r}")
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not value >= 0:
            raise ConfigError(f"{name} must be 0 or more; got {value!r}")


def norm_of(x: torch.Tensor) -> torch.Tensor:
    """Return the norm, in float32 of half precisions, whose largest number it may pass."""
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else None
    return torch.linalg.vector_norm(x, dtype=wide)


def start_state(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> dict[str, Any]:
    """Return the optimizer's state of a parameter, which is made if it is missing."""
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
    """Take one step of Adam; see :func:`direction`."""
    update = direction(gradient, state, group, frozen, is_momentum)
    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])


def direction(
    gradient: torch.Tensor,
    state: dict[str, Any],
    group: dict[str, Any],
    frozen: bool,
    is_momentum: bool,
) -> torch.Tensor:
    """Return the direction of Adam's step, after an update of its state.

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
    return update


def scale_of(state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
    """Return sqrt(v) + eps, by which momentum is divided; infinite where v is 0, and nothing is
    known."""
    v = state["exp_avg_sq"]
    if group["bias_correction"] and state["variance_step"]:
        v = v / (1 - group["betas"][1] ** state["variance_step"])
    return v.sqrt().add_(group["eps"]).masked_fill_(v == 0, torch.inf)
