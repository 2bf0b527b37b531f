"""Outer steps: what rounds of local steps do with the average of what the ranks moved by."""

from __future__ import annotations

import dataclasses
import functools

from hvd_compress.base import Array
from hvd_compress.config import Configurable, check_between, check_bool, checked


@dataclasses.dataclass(frozen=True)
class OuterSGD(Configurable, kind="outer optimizer", name="sgd"):
    """SGD as in ``torch.optim.SGD``::

        v = momentum v + d
        x = x - lr (d + momentum v)        with Nesterov momentum, else x - lr v

    Args:
        lr: the learning rate, 0 or more.
        momentum: from 0, for none, to 1.
        nesterov: use Nesterov momentum.

    >>> OuterSGD(lr=0.5, momentum=0.0).stepped(np.array([1.0]), np.array([0.2]), {})
    (array([0.9]), {})
    """

    lr: float = checked(functools.partial(check_between, low=0), 0.7)
    momentum: float = checked(functools.partial(check_between, low=0, high=1), 0.9)
    nesterov: bool = checked(check_bool, True)

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
        x: the parameters at which the round began, of any shape; d and u are like it.
        d: what the ranks moved by since, on average, with the sign of a gradient.
        u: the momentum; zeros at first.
        rate: the learning rate of the local step at which the round ends.
        lr, momentum: alpha, and beta in [0, 1), of the paper.

    Reference: Wang et al., ICLR 2020.

    >>> x, u = np.array([1.0]), np.array([0.0])
    >>> slow_momentum(x, np.array([0.5]), u, rate=0.1, lr=1.0, momentum=0.5)
    (array([0.5]), array([5.]))
    """
    u = u * momentum + d * (1 / rate)
    return x - u * (lr * rate), u
