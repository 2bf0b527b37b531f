"""0/1 Adam, the optimizer (Lu et al., ICLR 2023); its messages: ``methods/onebit.py``."""

from __future__ import annotations

import dataclasses
import functools

from hvd_compress.backends import Array, backend_of
from hvd_compress.methods.onebit import ZeroOneAdamCompression
from hvd_compress.optimizers.adam import MOMENTS, FrozenAdam
from hvd_compress.optimizers.base import Now, Slot, State

#: what is there from the first local step on
_LOCAL = ("anchor", "buffer", "rate")


@dataclasses.dataclass(frozen=True)
class ZeroOneAdam(FrozenAdam):
    """Adam that learns its variance at ever fewer steps, and later synchronizes at ever fewer.

    Until ``var_freeze_step`` it is Adam on averaged gradients.  Then each rank steps alone, with
    v as it is, s = sqrt(v^) + eps and d = 1 - lr weight_decay::

        m = beta1 m + (1 - beta1) g;  a = d a;  u = d u + lr m^;  r = d r + lr;  w = a - u / s
        u = 1-bit mean of u;  w = a = a - u / s;  m^ = u / r;  u = r = 0      to synchronize

    State of a parameter: ``exp_avg`` m, ``exp_avg_sq`` v, ``step``, ``variance_step``.  The freeze
    adds ``anchor`` a, ``buffer`` u, ``rate`` r, and the rounding error of u.

    Options:
        lr, betas, eps, weight_decay, bias_correction: as for ``OneBitAdam``.
        var_freeze_step, var_update_scaler, local_step_scaler, local_step_clipper: see
            :class:`~hvd_compress.methods.onebit.ZeroOneAdamCompression`.

    Reference: Lu, Li, Zhang, De Sa, He, ICLR 2023, arXiv 2202.06009.

    >>> adam, w = ZeroOneAdam(lr=0.1, var_freeze_step=1), np.array([1.0])
    >>> w, state = adam.step(w, np.array([2.0]), {}, Now(step=1))
    >>> w, state = adam.step(w, np.array([-1.0]), state, Now(step=2, frozen=True, is_local=True))
    >>> w.round(4), state["rate"], adam.phases.phase(1), adam.phases.phase(2)
    (array([0.8789]), 0.1, 'variance', 'sync')
    """

    slots = (
        *MOMENTS,
        Slot("anchor", since="is_local"),
        Slot("buffer", since="is_local"),
        Slot("rate", "number", since="is_local"),
    )
    method = ZeroOneAdamCompression
    schedule = ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")

    var_freeze_step: int = 100_000
    var_update_scaler: int = 16
    local_step_scaler: int = 32_678
    local_step_clipper: int = 16

    @functools.cached_property
    def phases(self) -> ZeroOneAdamCompression:
        """Its compression, which knows the phase of each step."""
        return self.compressor()

    def update(self, w: Array, g: Array, state: State, now: Now) -> tuple[Array, State]:
        xp = backend_of(w)
        m, v = self.moments(g, state, now)
        scale, rate = self.scale(v, now), self.lr / self.bias(now)
        late = {name: state[name] for name in _LOCAL if name in state}

        def common_step() -> tuple[Array, State]:
            return xp.add_scaled(self.decayed(w), m / scale, -rate), late

        def local_step() -> tuple[Array, State]:
            # After a synchronization the parameter itself is the anchor.
            known = late["rate"] > 0
            anchor = xp.choose(known, lambda: late["anchor"], lambda: xp.copy(w))
            buffer = late["buffer"]
            if self.weight_decay:
                buffer = xp.affine(buffer, 1 - self.lr * self.weight_decay)
            buffer = xp.add_scaled(buffer, m, rate)
            passed = late["rate"] * (1 - self.lr * self.weight_decay) + self.lr
            anchor = self.decayed(anchor)
            return anchor - buffer / scale, {"anchor": anchor, "buffer": buffer, "rate": passed}

        w, late = xp.choose(now.is_local, local_step, common_step)
        return w, {"exp_avg": m, "exp_avg_sq": v, **late}

    def synchronized(self, w: Array, mean: Array, state: State, now: Now) -> tuple[Array, State]:
        """Return weights and state after a synchronization.

        Args:
            mean: that of the ranks' ``buffer``.
        """
        xp, rate = backend_of(w), state["rate"]
        moved = rate > 0  # else only residuals move the parameter
        start = xp.either(moved, lambda: state["anchor"], lambda: w)
        w = start - mean / self.scale(state["exp_avg_sq"], now)
        m = xp.either(
            moved, lambda: xp.scale(mean, self.bias(now) / rate), lambda: state["exp_avg"]
        )
        return w, state | {
            **{"anchor": w, "exp_avg": m},
            **{"buffer": xp.full_like(w, 0.0), "rate": rate * 0},
        }
