"""Optimizers of servers: formulas over arrays, or an optimizer of a framework."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from hvd_compress.optimizers.base import Formula, Now, State
from hvd_compress.systems.base import Arrays


class ServerOptimizer(Protocol):
    """Steps on a server's parameters."""

    def step(self, parameters: Arrays, gradients: Arrays, rates: Sequence[float]) -> None:
        """Change ``parameters`` in place, those that have a gradient.  ``rates`` are the worker's
        learning rates, one for each group of parameters; none means the optimizer's own."""


class ArrayOptimizer:
    """Steps by a formula, with a state for each parameter."""

    def __init__(self, formula: Formula) -> None:
        self.formula = formula
        self._states: dict[str, State] = {}
        self._steps = Counter[str]()  # a parameter without gradient takes none

    def step(self, parameters: Arrays, gradients: Arrays, rates: Sequence[float]) -> None:
        formula = dataclasses.replace(self.formula, lr=rates[0] if rates else self.formula.lr)
        for name, g in gradients.items():
            self._steps[name] += 1
            w, state, now = parameters[name], self._states.get(name, {}), Now(self._steps[name])
            w[...], self._states[name] = formula.step(w, g, state, now)


@dataclasses.dataclass(frozen=True)
class SGD(Formula):
    """SGD as ``torch.optim.SGD``.

    Args:
        lr: the learning rate where the worker sends none.
        momentum, nesterov, weight_decay: as there; 0 for none.

    >>> from hvd_compress.optimizers import Now
    >>> SGD(lr=0.5).step(np.array([1.0]), np.array([0.2]), {}, Now(step=1))
    (array([0.9]), {})
    """

    not_negative = ("lr", "momentum", "weight_decay")

    lr: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def update(
        self, w: np.ndarray, g: np.ndarray, state: State, now: Now
    ) -> tuple[np.ndarray, State]:
        g = g + self.weight_decay * w if self.weight_decay else g
        if self.momentum:
            v = self.momentum * state["velocity"] + g if state else g
            state, g = {"velocity": v}, g + self.momentum * v if self.nesterov else v
        return w - self.lr * g, state
