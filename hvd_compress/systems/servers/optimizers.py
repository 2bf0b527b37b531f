"""What servers step with: plain numbers, element by element, so that pieces step as wholes do."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from hvd_compress.config import is_number
from hvd_compress.errors import ConfigError


class ServerOptimizer(Protocol):
    """Steps on a server's pieces."""

    def step(
        self,
        parameters: Mapping[str, np.ndarray],
        gradients: Mapping[str, np.ndarray],
        rates: Sequence[float],
        scale: float = 1.0,
    ) -> None:
        """Change ``parameters`` in place, those that have a gradient.  ``rates`` are the worker's
        learning rates, one for each group of parameters; none means the optimizer's own.  They are
        multiplied by ``scale``."""


@dataclasses.dataclass
class SGDServer:
    """SGD as ``torch.optim.SGD``, in NumPy.

    Args:
        lr: the learning rate where the worker sends none.
        momentum, nesterov, weight_decay: as usual.
    """

    lr: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        for option in ("lr", "momentum", "weight_decay"):
            _check(option, getattr(self, option))
        self._velocity: dict[str, np.ndarray] = {}

    def step(
        self,
        parameters: Mapping[str, np.ndarray],
        gradients: Mapping[str, np.ndarray],
        rates: Sequence[float],
        scale: float = 1.0,
    ) -> None:
        lr = scale * (rates[0] if rates else self.lr)
        for name, g in gradients.items():
            x = parameters[name]
            if self.weight_decay:
                g = g + self.weight_decay * x
            if self.momentum:
                v = self._velocity.get(name)
                v = g.copy() if v is None else self.momentum * v + g
                self._velocity[name] = v
                g = g + self.momentum * v if self.nesterov else v
            x -= lr * g


@dataclasses.dataclass
class AdamServer:
    """Adam as ``torch.optim.Adam``, in NumPy.

    Args:
        lr: the learning rate where the worker sends none.
        betas, eps, weight_decay: as usual; the decay is added to the gradient.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        for option in ("lr", "eps", "weight_decay"):
            _check(option, getattr(self, option))
        if len(self.betas) != 2 or not all(is_number(b) and 0 <= b < 1 for b in self.betas):
            raise ConfigError(f"betas must be two numbers in [0, 1); got {self.betas!r}")
        self._moments: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._steps = Counter[str]()  # a parameter without gradient takes none

    def step(
        self,
        parameters: Mapping[str, np.ndarray],
        gradients: Mapping[str, np.ndarray],
        rates: Sequence[float],
        scale: float = 1.0,
    ) -> None:
        lr = scale * (rates[0] if rates else self.lr)
        one, two = self.betas
        for name, g in gradients.items():
            self._steps[name] += 1
            x, steps = parameters[name], self._steps[name]
            if self.weight_decay:
                g = g + self.weight_decay * x
            m, v = self._moments.get(name, (np.zeros_like(x), np.zeros_like(x)))
            m, v = one * m + (1 - one) * g, two * v + (1 - two) * g * g
            self._moments[name] = m, v
            root = np.sqrt(v / (1 - two**steps)) + self.eps
            x -= lr / (1 - one**steps) * m / root


def _check(option: str, value: Any) -> None:
    if not is_number(value) or value < 0:
        raise ConfigError(f"{option} must be 0 or more; got {value!r}")
