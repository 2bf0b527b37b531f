"""The outer optimizer of DiLoCo."""

from __future__ import annotations

import dataclasses

from hvd_compress.base import Array
from hvd_compress.config import Configurable
from hvd_compress.errors import ConfigError
from hvd_compress.training.base import check_between


@dataclasses.dataclass(frozen=True)
class OuterSGD(Configurable, kind="outer optimizer", name="sgd"):
    """SGD as in ``torch.optim.SGD``::

        v = momentum v + d
        x = x - lr (d + momentum v)        with Nesterov momentum, else x - lr v

    Args:
        lr: the learning rate.
        momentum: 0 for none.
        nesterov: use Nesterov momentum.
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("lr", self.lr, 0)
        check_between("momentum", self.momentum, 0, 1)
        if not isinstance(self.nesterov, bool):
            raise ConfigError(f"nesterov must be True or False; got {self.nesterov!r}")

    def stepped(
        self, x: Array, d: Array, moments: dict[str, Array]
    ) -> tuple[Array, dict[str, Array]]:
        """Return x and the moments, which are "velocity" or empty, after a step along ``d``."""
        if not self.momentum:
            return x - d * self.lr, {}
        v = moments["velocity"] * self.momentum + d
        direction = d + v * self.momentum if self.nesterov else v
        return x - direction * self.lr, {"velocity": v}
