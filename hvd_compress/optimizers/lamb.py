"""LAMB (You et al., ICLR 2020, arXiv 1904.00962)."""

from __future__ import annotations

import dataclasses

from hvd_compress.backends import Array, backend_of
from hvd_compress.optimizers.adam import AdamFormula
from hvd_compress.optimizers.base import Now, State, quotient


@dataclasses.dataclass(frozen=True)
class LAMB(AdamFormula):
    """Adam whose steps are as long as each layer's weights, times the learning rate::

        m = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g^2
        u = m^ / (sqrt(v^) + eps) + wd w
        w = w - lr (||w|| / ||u||) u                  the quotient is 1 if either norm is 0

    State of a parameter: ``exp_avg`` m, ``exp_avg_sq`` v and ``step``, the number of updates.

    Options:
        lr: the fraction of a layer's norm by which its weights change.
        betas: beta1 and beta2, of the moving averages m and v; in [0, 1).
        eps: added to the root of the variance.
        weight_decay: wd, added to Adam's direction before its norm is taken.

    Reference: You et al., "Large batch optimization for deep learning: training BERT in 76
    minutes", ICLR 2020, arXiv 1904.00962, with phi(x) = x.

    >>> import numpy as np
    >>> w, state = np.array([3.0, 4.0]), {}
    >>> w, state = LAMB(lr=0.1).step(w, np.array([0.6, 0.8]), state, Now(step=1))
    >>> w.round(3).tolist(), sorted(state)
    ([2.646, 3.646], ['exp_avg', 'exp_avg_sq'])
    """

    eps: float = 1e-6

    def update(self, w: Array, g: Array, state: State, now: Now) -> tuple[Array, State]:
        xp, (beta1, beta2) = backend_of(w), self.betas
        m, v = self.momentum(state["exp_avg"], g), self.variance(state["exp_avg_sq"], g)
        # The bias of m is a factor of the whole: less than eps must not be added to the root, or
        # half precisions have 0 / 0.
        of_m, of_v = 1 - beta1**now.step, 1 - beta2**now.step
        u = xp.affine(m / xp.affine(xp.sqrt(v), of_v**-0.5, self.eps), 1 / of_m)
        if self.weight_decay:
            u = xp.add_scaled(u, w, self.weight_decay)
        norm_w, norm_u = xp.vector_norm([w]), xp.vector_norm([u])
        rate = self.lr * quotient(xp, norm_w, norm_u, norm_w, norm_u)
        return xp.add_scaled(w, u, -rate), {"exp_avg": m, "exp_avg_sq": v}
