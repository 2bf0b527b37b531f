"""1-bit LAMB (Li, Awan, Tang, Rajbhandari, He; 2021, arXiv 2104.06069), with the messages of 1-bit
Adam: ``methods/onebit_adam.py``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hvd_compress.methods.onebit_adam import check_coefficients, check_freeze_step

from .frozen_adam import FrozenAdam, direction, norm_of, scale_of
from .onebit_adam import OneBitAdam


class OneBitLAMB(OneBitAdam):
    """LAMB whose variance and whose layers' coefficients are frozen after ``freeze_step`` steps, so
    that momentum can be sent in one bit an element::

        lamb = hvd.OneBitLAMB(model.parameters(), lr=2e-3, freeze_step=2000)
        optimizer = hvd.DistributedOptimizer(
            lamb, named_parameters=model.named_parameters(), compression=lamb.compressor()
        )

    For each layer, with m, v and hats as in :class:`OneBitAdam`::

        u = m^ / (sqrt(v^) + eps) + weight_decay p
        until freeze_step   c = ||p|| / ||u||, clipped to coefficient_range
                            a = coefficient_beta a + (1 - coefficient_beta) c
                            p = p - lr c u
        later               g' = (m - beta1 m_before) / (1 - beta1)
                            v' = beta2 v' + (1 - beta2) g'^2, beginning as v
                            r = max of (sqrt(v^) + eps) / (sqrt(v'^) + eps), clipped
                            p = p - lr a r u

    g' is the gradient that the momentum in one bit stands for, and v' the variance that Adam would
    have now.  So r says how much the layer's gradients have shrunk since the freeze, and longer
    steps make up for a variance that is too large.  Of the step's direction, the share that is
    weight decay is not scaled by r.

    State of a parameter: that of ``OneBitAdam``, the average ``coefficient`` a, and from the freeze
    on ``fresh_exp_avg_sq`` v' and ``factor`` r; all equal on all ranks.

    Args:
        params, lr, betas, eps, freeze_step, bias_correction: as for ``OneBitAdam``.
        weight_decay: a part of the direction u, as in LAMB.
        coefficient_range, coefficient_beta: see above.
        factor_range: of r.
        factor_threshold: from one step to the next r changes by this share at most.

    The formulas and defaults are those of the released code, DeepSpeed's ``OnebitLamb``.  Differs
    from it in: the differences of ``OneBitAdam``; a begins as the first c and not as 0, and takes
    in a c of exactly 1, too; where v is 0, r does not look; each tensor has a scale of its own in
    the message, where that code scales the momenta of all layers to the same magnitude to give them
    one scale in common.

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
        coefficient_range: tuple[float, float] = (0.01, 10.0),
        coefficient_beta: float = 0.9,
        factor_range: tuple[float, float] = (0.5, 4.0),
        factor_threshold: float = 0.1,
    ) -> None:
        check_freeze_step(freeze_step)
        check_coefficients(coefficient_range, coefficient_beta, factor_range, factor_threshold)
        FrozenAdam.__init__(
            self,
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            freeze_step=freeze_step,
            bias_correction=bias_correction,
            coefficient_range=tuple(coefficient_range),
            coefficient_beta=coefficient_beta,
            factor_range=tuple(factor_range),
            factor_threshold=factor_threshold,
        )

    def update(
        self,
        p: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
        frozen: bool,
        is_momentum: bool,
    ) -> None:
        before = state["exp_avg"].clone() if frozen else None
        adams = direction(gradient, state, group, frozen, is_momentum)
        u = adams.add(p, alpha=group["weight_decay"])
        norm = norm_of(u)
        if before is None:
            norm_p = norm_of(p)
            c = torch.where((norm > 0) & (norm_p > 0), norm_p / norm, 1.0)
            c = c.clamp(*group["coefficient_range"])
            a = state.get("coefficient", c)
            state["coefficient"] = a + (1 - group["coefficient_beta"]) * (c - a)
        else:
            share = torch.where(norm > 0, norm_of(adams) / norm, 1.0).clamp(max=1)
            c = _frozen_coefficient(before, state, group, share)
        p.sub_(u * (group["lr"] * c))


def _frozen_coefficient(
    before: torch.Tensor, state: dict[str, Any], group: dict[str, Any], share: torch.Tensor
) -> torch.Tensor:
    """Return a r, and update what r is computed from; ``share`` of the step is not decay."""
    v, (beta1, beta2) = state["exp_avg_sq"], group["betas"]
    if "factor" not in state:
        state["fresh_exp_avg_sq"], state["factor"] = v.clone(), share.new_ones(())
    g = (state["exp_avg"] - beta1 * before) / (1 - beta1)
    fresh = state["fresh_exp_avg_sq"].mul_(beta2).addcmul_(g, g, value=1 - beta2)
    quotients = scale_of(state, group) / scale_of({**state, "exp_avg_sq": fresh}, group)
    # Where v is 0 nothing is known, and no step is taken.
    largest = quotients.masked_fill(v == 0, 0).amax() if v.numel() else share.new_ones(())
    factor = (largest * share + (1 - share)).clamp(*group["factor_range"])
    last, change = state["factor"], group["factor_threshold"]
    factor = torch.minimum(torch.maximum(factor, last * (1 - change)), last * (1 + change))
    state["factor"] = factor
    return state.get("coefficient", share.new_ones(())) * factor
