"""Outer steps: what rounds of local steps do with the average of what the ranks moved by."""

from __future__ import annotations

import dataclasses

from hvd_compress.base import Array
from hvd_compress.config import Configurable, check_between
from hvd_compress.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class OuterSGD(Configurable, kind="outer optimizer", name="sgd"):
    """SGD as in ``torch.optim.SGD``::

        v = momentum v + d
        x = x - lr (d + momentum v)        with Nesterov momentum, else x - lr v

    Args:
        lr: the learning rate, 0 or more.
        momentum: from 0, for none, to 1.
        nesterov: use Nesterov momentum.

    Raises:
        ConfigError: an option makes no sense.

    >>> OuterSGD(lr=0.5, momentum=0.0).stepped(np.array([1.0]), np.array([0.2]), {})
    (array([0.9]), {})
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


def slow_momentum(
    x: Array, d: Array, u: Array, *, rate: float, lr: float, momentum: float
) -> tuple[Array, Array]:
    """Return x and the momentum after the outer step of SlowMo::

        u = momentum u + d / rate
        x = x - lr rate u

    Args:
        rate: the learning rate of the local step at which the round ends.

    Reference: Wang et al., ICLR 2020.
    """
    u = u * momentum + d * (1 / rate)
    return x - u * (lr * rate), u
