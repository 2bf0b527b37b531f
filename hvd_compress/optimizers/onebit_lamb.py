"""1-bit LAMB (Li, Awan, Tang, Rajbhandari, He; 2021, arXiv 2104.06069), with the messages of 1-bit
Adam: ``methods/onebit.py``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hvd_compress.backends import Array, backend_of
from hvd_compress.config import as_tuple
from hvd_compress.optimizers.adam import MOMENTS
from hvd_compress.optimizers.base import Now, Slot, State, check_options, quotient
from hvd_compress.optimizers.onebit_adam import OneBitAdam


@dataclasses.dataclass(frozen=True)
class OneBitLAMB(OneBitAdam):
    """LAMB whose momentum is sent in one bit per element after ``freeze_step`` steps.

    Before the freeze, a layer steps along u by its coefficient c, of which a is the average.  Later
    it steps by a r; r says how much gradients have shrunk since the freeze::

        g' = (m - beta1 m_before) / (1 - beta1);  v' = beta2 v' + (1 - beta2) g'^2
        r = max of (sqrt(v^) + eps) / (sqrt(v'^) + eps)

    State of a parameter: that of ``OneBitAdam`` and the average ``coefficient`` a.  The freeze adds
    ``fresh_exp_avg_sq`` v' and ``factor`` r.  All are equal on all ranks.

    Options:
        lr, betas, eps, freeze_step, bias_correction: as for ``OneBitAdam``.
        weight_decay: a part of the direction u, as in LAMB.
        coefficient_range, factor_range: the least and the largest c, and r.
        coefficient_beta: of the moving average a, in [0, 1).
        factor_threshold: from one step to the next r changes by this share at most, in (0, 1).

    Reference: Li, Awan, Tang, Rajbhandari, He, arXiv 2104.06069.

    >>> lamb, w = OneBitLAMB(lr=0.1, freeze_step=1), np.array([3.0, 4.0])
    >>> lamb.step(w, np.array([0.6, 0.8]), {}, Now(step=1))[0].round(3)
    array([2.646, 3.646])
    """

    slots = (
        *MOMENTS,
        Slot("fresh_exp_avg_sq", since="frozen", start="exp_avg_sq"),
        Slot("coefficient", "scalar"),
        Slot("factor", "scalar", since="frozen", start=1.0),
    )

    coefficient_range: tuple[float, float] = (0.01, 10.0)
    coefficient_beta: float = 0.9
    factor_range: tuple[float, float] = (0.5, 4.0)
    factor_threshold: float = 0.1

    def __post_init__(self) -> None:
        for name in ("coefficient_range", "factor_range"):
            object.__setattr__(self, name, as_tuple(name)(getattr(self, name)))
        super().__post_init__()

    def check(self, names: Mapping[str, str]) -> None:
        super().check(names)
        for name in ("coefficient_range", "factor_range"):
            check_options(
                {name: getattr(self, name)},
                lambda ends: len(ends) == 2 and 0 < ends[0] <= ends[1],
                "two numbers, 0 < low <= high",
            )
        beta, threshold = self.coefficient_beta, self.factor_threshold
        check_options({"coefficient_beta": beta}, lambda x: 0 <= x < 1, "in [0, 1)")
        check_options({"factor_threshold": threshold}, lambda x: 0 < x < 1, "in (0, 1)")

    def update(self, w: Array, g: Array, state: State, now: Now) -> tuple[Array, State]:
        xp, before, beta1 = backend_of(w), state["exp_avg"], self.betas[0]
        # The gradient that leads from one momentum to the next.
        implied = xp.either(now.is_momentum, lambda: (g - before * beta1) / (1 - beta1), lambda: g)
        m, v = self.moments(g, state, now)
        u = m / xp.affine(self.scale(v, now), self.bias(now))
        norm_adams = xp.vector_norm([u])
        if self.weight_decay:
            u = xp.add_scaled(u, w, self.weight_decay)
        norm_u, a = xp.vector_norm([u]), state["coefficient"]
        late: State = {
            name: state[name] for name in ("fresh_exp_avg_sq", "factor") if name in state
        }

        def lambs_coefficient() -> tuple[Any, State]:
            norm_w = xp.vector_norm([w])
            c = xp.clip(quotient(xp, norm_w, norm_u, norm_w, norm_u), *self.coefficient_range)
            start = xp.where(a > 0, a, c)
            average = start + (1 - self.coefficient_beta) * (c - start)
            # Where it is there already, it follows.
            tracked = {"fresh_exp_avg_sq": v} if "fresh_exp_avg_sq" in late else {}
            return c, {**late, **tracked, "coefficient": average}

        def frozen_coefficient() -> tuple[Any, State]:
            share = xp.clip(quotient(xp, norm_adams, norm_u, norm_u), 0.0, 1.0)
            fresh = self.variance(late["fresh_exp_avg_sq"], implied)
            factor = self._factor(v, fresh, share, late["factor"], now)
            new = {"fresh_exp_avg_sq": fresh, "factor": factor, "coefficient": a}
            return xp.where(a > 0, a, xp.scalar(1.0, w)) * factor, new

        c, new = xp.choose(now.frozen, frozen_coefficient, lambs_coefficient)
        return xp.add_scaled(w, u, c * -self.lr), {"exp_avg": m, "exp_avg_sq": v, **new}

    def _factor(self, v: Array, fresh: Array, share: Any, last: Any, now: Now) -> Any:
        """Return r; ``share`` of the step is not decay."""
        xp = backend_of(v)
        largest = xp.scalar(1.0, v)
        if 0 not in xp.shape(v):
            # Where v is 0 nothing is known, and no step is taken.
            quotients = self.root(v, now) / self.root(fresh, now)
            largest = xp.max(xp.put_where(quotients, v == 0, 0.0))
        new = xp.clip(largest * share + (1 - share), *self.factor_range)
        change = self.factor_threshold
        return xp.clip(new, last * (1 - change), last * (1 + change))
