"""The base of transforms that take the optimizer's momentum over."""

from __future__ import annotations

import dataclasses
from typing import Any

from hvd_compress.base import Context
from hvd_compress.chain import Transform
from hvd_compress.config import check_choice, is_number
from hvd_compress.errors import ConfigError


def check_momentum(option: str, value: Any) -> None:
    """Raise unless ``value`` is in [0, 1)."""
    if not is_number(value) or not 0 <= value < 1:
        raise ConfigError(f"{option} must be a number in [0, 1); got {value!r}")


@dataclasses.dataclass(frozen=True)
class TakesMomentum(Transform):
    """``momentum`` and ``nesterov``: ``None`` takes the optimizer's, from the context."""

    momentum: float | None = None
    nesterov: bool | None = None

    keys = ("velocity",)
    elementwise = True
    takes_momentum = True

    def __post_init__(self) -> None:
        check_choice("nesterov", self.nesterov, (None, True, False))
        if self.momentum is not None:
            check_momentum("momentum", self.momentum)

    def in_use(self, context: Context) -> tuple[float, bool]:
        """Return momentum and Nesterov flag, of the options or else of the optimizer."""
        return (
            context.momentum if self.momentum is None else self.momentum,
            context.nesterov if self.nesterov is None else self.nesterov,
        )
