"""LARS and LAMB for PyTorch; their formulas are those of ``training/large_batch/layerwise.py``."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hvd_compress.training.large_batch.scaling import check_not_negative

from ..frozen_adam import check_adam, norm_of
from ..partner import loss_of


class _Layerwise(torch.optim.Optimizer, abc.ABC):
    """One tensor after the other; subclasses say how."""

    @abc.abstractmethod
    def update(
        self, p: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        """Step with one parameter along its gradient; ``state`` and ``group`` are those of it."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step along the gradients; return the loss of the closure, if there is one."""
        loss = loss_of(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    gradient = p.grad.to_dense() if p.grad.is_sparse else p.grad
                    self.update(p, gradient, self.state[p], group)
        return loss


def _quotient(numerator: torch.Tensor, denominator: torch.Tensor, *norms: torch.Tensor) -> Any:
    """Return the quotient, 1 where one of the norms is 0; nothing waits for the device."""
    positive = torch.stack([norm > 0 for norm in norms]).all()
    return torch.where(positive, numerator / denominator, torch.ones_like(numerator))


class LARS(_Layerwise):
    """SGD with momentum whose learning rate follows the norms of each layer::

        optimizer = hvd.LARS(model.parameters(), lr=3.2, weight_decay=1e-4)
        optimizer = hvd.DistributedOptimizer(optimizer, compression=hvd.TopK(density=0.01))

        l = trust_coefficient ||w|| / (||g|| + wd ||w||);   v = m v + lr l (g + wd w);   w = w - v

    Tensors of one dimension, biases and scales, take plain steps: l = 1 and no weight decay.
    Compression that takes momentum over, as DGC does, leaves that of LARS alone.

    State of a parameter: ``velocity`` v, which contains the learning rate.

    Args:
        params: as for every optimizer.
        lr: global learning rate; LARS is tuned with large ones, such as 1 to 30.
        momentum: m.
        weight_decay: wd, inside the step and inside of l.
        trust_coefficient: length of a step beside the weights, at lr 1.

    Raises:
        ConfigError: an option makes no sense.

    Reference: You, Gitman and Ginsburg, 2017, arXiv 1708.03888.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
    ) -> None:
        options = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
        }
        check_not_negative(**options)
        super().__init__(params, options)

    def update(
        self, p: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        if "velocity" not in state:
            state["velocity"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        rate, direction = group["lr"], gradient
        if p.ndim > 1:
            decay = group["weight_decay"]
            norm_w, norm_g = norm_of(p), norm_of(gradient)
            local = _quotient(
                group["trust_coefficient"] * norm_w, norm_g + decay * norm_w, norm_w, norm_g
            )
            rate, direction = rate * local, gradient.add(p, alpha=decay)
        state["velocity"].mul_(group["momentum"]).add_(direction * rate)
        p.sub_(state["velocity"])


class LAMB(_Layerwise):
    """Adam whose steps are as long as each layer's weights, times the learning rate::

        optimizer = hvd.LAMB(model.parameters(), lr=2e-3, weight_decay=0.01)
        optimizer = hvd.DistributedOptimizer(optimizer, compression=hvd.PowerSGD(rank=4))

        u = m^ / (sqrt(v^) + eps) + wd w;   w = w - lr (||w|| / ||u||) u

    State of a parameter: ``exp_avg``, ``exp_avg_sq`` and ``step``.

    Args:
        params: as for every optimizer; give biases a group with ``weight_decay=0``.
        lr: the fraction of a layer's norm by which its weights change.
        betas, eps: of Adam.
        weight_decay: wd, added to Adam's direction before its norm is taken.

    Raises:
        ConfigError: an option makes no sense.

    Reference: You et al., ICLR 2020, arXiv 1904.00962.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        check_adam(lr, betas, eps, weight_decay)
        options = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options)

    def update(
        self, p: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        if "exp_avg" not in state:
            state["step"] = 0
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.zeros_like(p, memory_format=torch.preserve_format)
        (beta1, beta2), m, v = group["betas"], state["exp_avg"], state["exp_avg_sq"]
        state["step"] += 1
        m.mul_(beta1).add_(gradient, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (v / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
        u = m.div(1 - beta1 ** state["step"]).div_(root).add_(p, alpha=group["weight_decay"])
        norm_w, norm_u = norm_of(p), norm_of(u)
        p.sub_(u * (group["lr"] * _quotient(norm_w, norm_u, norm_w, norm_u)))
