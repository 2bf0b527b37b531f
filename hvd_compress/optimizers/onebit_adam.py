"""1-bit Adam, the optimizer (Tang et al., ICML 2021); its messages: ``methods/onebit_adam.py``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hvd_compress.backends import Array, backend_of
from hvd_compress.methods.onebit_adam import OneBitAdamCompression, check_freeze_step
from hvd_compress.optimizers.adam import FrozenAdam
from hvd_compress.optimizers.base import Now, State


@dataclasses.dataclass(frozen=True)
class OneBitAdam(FrozenAdam):
    """Adam whose variance is frozen after ``freeze_step`` steps, so that momentum can be sent in
    one bit an element.

    With gradients g averaged over the ranks, and without a hat where ``bias_correction`` is off::

        m = beta1 m + (1 - beta1) g
        v = beta2 v + (1 - beta2) g^2                       until freeze_step, not later
        w = w - lr (m^ / (sqrt(v^) + eps) + weight_decay w)

    After ``freeze_step`` the exchange returns the new m instead of g, equal on all ranks.
    Elements that had no gradient until then have v = 0 and no scale: they stay where they are,
    but for decay, since one bit cannot say that their momentum is zero.

    Without this package's compression, the same steps are taken with gradients that are averaged
    otherwise, or of one process.

    State of a parameter: ``exp_avg`` m, ``exp_avg_sq`` v, ``step`` and ``variance_step``, the
    number of updates of each; all equal on all ranks.  Gradients of some rows travel as they are,
    and their momentum is exact.

    Options:
        lr: the learning rate.
        betas: beta1 and beta2, of the moving averages m and v; in [0, 1).
        eps: added to the root of the corrected variance.
        weight_decay: decoupled from the gradient, as in AdamW.
        freeze_step: a number of steps, 1 or more; see above.
        bias_correction: divide m by ``1 - beta1^step`` and v by ``1 - beta2^variance_step``, as
            ``torch.optim.AdamW`` does, so that freezing early does not lengthen the steps.

    Reference: Tang et al., ICML 2021, arXiv 2102.02888.  Differs from the released code in: bias
    correction, which that lacks (``bias_correction=False`` is its formula); the elements without
    variance, for which it asks the user for a mask; there is no dummy step.

    >>> adam, w = OneBitAdam(lr=0.1, freeze_step=1), np.array([1.0, 1.0])
    >>> w, state = adam.step(w, np.array([0.5, -2.0]), {}, Now(step=1))
    >>> w.round(4), adam.compressor().frozen(step=0, epoch=0), adam.compressor().frozen(1, 0)
    (array([0.9, 1.1]), False, True)
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
