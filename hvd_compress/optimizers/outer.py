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
