"""Decentralised methods on functions given by their gradients, in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hvd_compress.config import is_number, is_whole
from hvd_compress.engines.base import Engine
from hvd_compress.errors import ConfigError
from hvd_compress.systems.coordinator import Coordinator
from hvd_compress.systems.graphs.base import DecentralizedMethod
from hvd_compress.systems.ranks import Ranks

#: ``gradient(rank, x, step)``; steps count from 0
Gradient = Callable[[int, np.ndarray, int], np.ndarray]

_X = "x"


def simulate(
    method: DecentralizedMethod,
    gradient: Gradient,
    start: np.ndarray | Sequence[np.ndarray],
    steps: int,
    rate: float,
    *,
    observe: Callable[[int, np.ndarray], None] | None = None,
    center: bool = False,
) -> np.ndarray:
    """Run all ranks of a method in this process, and return their last iterates, (ranks, d), in
    float64.

    Args:
        method: such as ``ExactDiffusion("cycle")``.
        gradient: ``gradient(rank, x, step)`` is the gradient of a rank's function at x, (d,), in
            step 0, 1, ...; it may be noisy.
        start: the ranks' first iterates, (ranks, d).
        steps: how many to take.
        rate: the learning rate.
        observe: is called with the number of steps taken and the iterates, after each.
        center: take the rounding out of the dual variables of :class:`LEAD` after each step.

    Raises:
        ConfigError: the topology does not fit the method or the number of ranks.
    """
    _check(steps, rate)
    x = [{_X: np.array(row)} for row in start]
    ranks = Ranks(method, len(x))
    iterates = np.stack([own[_X] for own in x])
    for step in range(steps):
        x = ranks.before_step(x, rates={_X: rate})
        x = [
            {_X: own[_X] - float(rate) * gradient(rank, own[_X], step)}
            for rank, own in enumerate(x)
        ]
        x = ranks.after_step(x)
        if center and hasattr(method, "centered"):
            flat = [{key: arrays[_X] for key, arrays in s.items()} for s in ranks.states]
            ranks.states = [
                {key: {_X: array} for key, array in own.items()} for own in method.centered(flat)
            ]
        iterates = np.stack([own[_X] for own in x])
        if observe is not None:
            observe(step + 1, iterates)
    return iterates


def train(
    method: DecentralizedMethod,
    gradient: Gradient,
    start: np.ndarray,
    steps: int,
    rate: float,
    engine: Engine,
) -> np.ndarray:
    """Run this rank's part over an engine, for instance ``hvd_compress.mpi.MpiEngine()``.

    A collective.  Returns the rank's last iterate, (d,): its row of what :func:`simulate` returns,
    bit for bit.

    Args:
        method, gradient, steps, rate: see :func:`simulate`; the same on all ranks.
        start: this rank's first iterate, (d,).
        engine: carries the messages.

    Raises: what :func:`simulate` does.
    """
    _check(steps, rate)
    coordinator, x = Coordinator(method, engine), {_X: np.array(start)}
    for step in range(steps):
        x = coordinator.before_step(x, rates={_X: rate})
        x = {_X: x[_X] - float(rate) * gradient(engine.rank, x[_X], step)}
        x = coordinator.after_step(x)
    return x[_X]


def _check(steps: int, rate: float) -> None:
    if not is_whole(steps) or steps < 0:
        raise ConfigError(f"steps must be a whole number from 0; got {steps!r}")
    if not is_number(rate) or not rate > 0:
        raise ConfigError(f"rate must be more than 0, for instance rate=0.1; got {rate!r}")
