"""1-bit Adam, the optimizer (Tang et al., ICML 2021); its messages: ``methods/onebit.py``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hvd_compress.backends import Array, backend_of
from hvd_compress.methods.onebit import OneBitAdamCompression, check_freeze_step
from hvd_compress.optimizers.adam import FrozenAdam
from hvd_compress.optimizers.base import Now, State


@dataclasses.dataclass(frozen=True)
class OneBitAdam(FrozenAdam):
    """Adam whose variance is frozen after ``freeze_step`` steps, so that momentum can be sent in
    one bit per element::

        m = beta1 m + (1 - beta1) g
        v = beta2 v + (1 - beta2) g^2                       until freeze_step, not later
        w = w - lr (m^ / (sqrt(v^) + eps) + weight_decay w)

    After ``freeze_step`` the exchange returns the new m instead of g.

    State of a parameter: ``exp_avg`` m, ``exp_avg_sq`` v, ``step`` and ``variance_step``, the
    number of updates of each; all equal on all ranks.

    Options:
        lr: the learning rate.
        betas: beta1 and beta2, of the moving averages m and v; in [0, 1).
        eps: added to the root of the corrected variance.
        weight_decay: decoupled from the gradient, as in AdamW.
        freeze_step: a number of steps, 1 or more; by the paper 15 to 20 % of the training.
        bias_correction: m^ and v^ are corrected for their start from zero, as in AdamW.

    Reference: Tang et al., ICML 2021, arXiv 2102.02888.

    >>> OneBitAdam(lr=0.1).step(np.ones(2), np.array([0.5, -2.0]), {}, Now(step=1))[0].round(4)
    array([0.9, 1.1])
    """

    method = OneBitAdamCompression
    schedule = ("freeze_step",)

    freeze_step: int = 100_000

    def check(self, names: Mapping[str, str]) -> None:
        check_freeze_step(self.freeze_step)  # the compression alone would take epochs as well
        super().check(names)

    def compression_options(self) -> dict[str, Any]:
        return {"beta1": self.betas[0], **super().compression_options()}

    def update(self, w: Array, g: Array, state: State, now: Now) -> tuple[Array, State]:
        m, v = self.moments(g, state, now)
        w = backend_of(w).add_scaled(
            self.decayed(w), m / self.scale(v, now), -self.lr / self.bias(now)
        )
        return w, {"exp_avg": m, "exp_avg_sq": v}
