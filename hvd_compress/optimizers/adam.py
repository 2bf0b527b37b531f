"""The base of Adam's relatives."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from hvd_compress.backends import Array, backend_of
from hvd_compress.config import as_tuple
from hvd_compress.optimizers.base import Formula, Now, Slot, State, check_options

MOMENTS = (Slot("exp_avg"), Slot("exp_avg_sq"))


@dataclasses.dataclass(frozen=True)
class AdamFormula(Formula):
    """Momentum m, ``exp_avg``, and variance v, ``exp_avg_sq``."""

    not_negative: ClassVar[tuple[str, ...]] = ("lr", "eps", "weight_decay")
    slots: ClassVar[tuple[Slot, ...]] = MOMENTS
    counts: ClassVar[tuple[str, ...]] = ("step",)

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", as_tuple("betas")(self.betas))
        super().__post_init__()

    def check(self, names: Mapping[str, str]) -> None:
        super().check(names)
        check_options(
            {names.get("betas", "betas"): self.betas},
            lambda betas: len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
            "two numbers in [0, 1)",
        )

    def momentum(self, m: Array, g: Array) -> Array:
        return backend_of(m).lerp(m, g, 1 - self.betas[0])

    def variance(self, v: Array, g: Array) -> Array:
        return backend_of(v).lerp_square(v, g, 1 - self.betas[1])


@dataclasses.dataclass(frozen=True)
class FrozenAdam(AdamFormula):
    """Adam whose variance is not updated in all steps.  Subclasses define in which it is."""

    counts = ("step", "variance_step")

    bias_correction: bool = dataclasses.field(default=True, kw_only=True)

    def check(self, names: Mapping[str, str]) -> None:
        super().check(names)
        self.compressor()  # checks the rest

    def moments(self, g: Array, state: State, now: Now) -> tuple[Array, Array]:
        """Return m and v after an update; reuses them."""
        m, v = state["exp_avg"], state["exp_avg_sq"]
        xp = backend_of(m)
        new = xp.either(now.is_momentum, lambda: xp.copy(g), lambda: self.momentum(m, g))
        return new, xp.either(now.frozen, lambda: v, lambda: self.variance(v, g))

    def bias(self, now: Now) -> Any:
        """Return the number by which Adam divides momentum."""
        return 1 - self.betas[0] ** now.step if self.bias_correction else 1.0

    def root(self, v: Array, now: Now) -> Array:
        xp = backend_of(v)
        known = 1 - self.betas[1] ** now.variance_step if self.bias_correction else 1.0
        return xp.affine(xp.sqrt(v), known**-0.5, self.eps)

    def scale(self, v: Array, now: Now) -> Array:
        """Return what momentum is divided by; infinite where v is 0, and nothing is known."""
        return backend_of(v).put_where(self.root(v, now), v == 0, float("inf"))

    def decayed(self, w: Array) -> Array:
        if not self.weight_decay:
            return w
        return backend_of(w).affine(w, 1 - self.lr * self.weight_decay)
