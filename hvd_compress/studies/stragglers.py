"""The cost of waiting for slow workers: formulas, and a simulation of them.

A worker's step takes a random time of mean 1, independent of others and of other steps.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_compress.config import check_choice
from hvd_compress.errors import ConfigError

DISTRIBUTIONS = ("exponential", "gaussian", "pareto")


@dataclasses.dataclass(frozen=True)
class Delays:
    """The time of a step: mean 1, standard deviation ``spread``.

    Args:
        distribution: "exponential": 1 - spread, plus an exponential time of mean ``spread`` (at
            most 1).  "gaussian" may fall below 0.  The tail of "pareto" falls as a power.
        spread: more than 0.
    """

    distribution: str = "exponential"
    spread: float = 1.0

    def __post_init__(self) -> None:
        check_choice("distribution", self.distribution, DISTRIBUTIONS)
        if not self.spread > 0:
            raise ConfigError(f"spread={self.spread} must be more than 0: it is a deviation")
        if self.distribution == "exponential" and self.spread > 1:
            raise ConfigError(
                f"spread={self.spread} must be at most 1 for exponential times of mean 1; a pareto "
                "distribution can be wider"
            )

    @property
    def _exponent(self) -> float:
        return 1 + math.sqrt(1 + self.spread**-2)

    def drawn(self, random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Return random times."""
        if self.distribution == "exponential":
            return 1 - self.spread + self.spread * random.standard_exponential(shape)
        if self.distribution == "gaussian":
            return 1 + self.spread * random.standard_normal(shape)
        a = self._exponent
        return (a - 1) / a * (1 + random.pareto(a, shape))

    def waited(self, workers: int, backup: int = 0) -> float:
        """Return the expected time until all but ``backup`` of the workers are done."""
        if self.distribution == "exponential":
            delay = harmonic(workers) - harmonic(backup)
            return 1 - self.spread + self.spread * delay
        if self.distribution == "gaussian":
            return 1 + self.spread * gaussian_order(workers, workers - backup)
        a = self._exponent
        log = math.lgamma(workers + 1) - math.lgamma(backup + 1)
        log += math.lgamma(backup + 1 - 1 / a) - math.lgamma(workers + 1 - 1 / a)
        return (a - 1) / a * math.exp(log)


def harmonic(n: int) -> float:
    """Return H_n = 1 + 1/2 + ... + 1/n: the mean largest of n exponential times of mean 1.

    >>> round(harmonic(32), 4)
    4.0585
    """
    return math.fsum(1 / i for i in range(1, n + 1))


def gaussian_order(n: int, k: int) -> float:
    """Return the mean of the k-th smallest of n standard normal numbers.

    >>> round(gaussian_order(32, 32), 4)
    2.0697
    """
    x = np.linspace(-12, 12, 20001)
    below = np.array([0.5 * math.erfc(-each / math.sqrt(2)) for each in x])
    with np.errstate(divide="ignore"):
        log = (k - 1) * np.log(below) if k > 1 else np.zeros_like(x)
        log = log + ((n - k) * np.log(below[::-1]) if n > k else 0)
    log += math.lgamma(n + 1) - math.lgamma(k) - math.lgamma(n - k + 1)
    density = np.exp(log - x * x / 2) / math.sqrt(2 * math.pi)
    return float(np.sum(x * density) * (x[1] - x[0]))


@dataclasses.dataclass
class Row:
    """Times in units of the mean time of a step.

    Attributes:
        expected: the time of a step by the formula; NaN where there is none.
        simulated: the same, measured.
        used: the gradients used in the mean time of a step, by all workers.
        idle: the part of the workers' time that is waited or computed for nothing.
        staleness: the mean number of updates between parameters and gradient.
    """

    strategy: str
    expected: float
    simulated: float
    used: float
    idle: float
    staleness: float = 0.0

    def facts(self) -> dict[str, Any]:
        """The same for JSON, which knows no NaN."""
        return dataclasses.asdict(self) | {
            "expected": None if math.isnan(self.expected) else self.expected
        }


def rows_of(
    delays: Delays,
    workers: int,
    *,
    backup: int,
    local_steps: int,
    steps: int,
    seed: int = 0,
    progress: Callable[[float], None] = lambda done: None,
) -> list[Row]:
    """Simulate a number of steps of each strategy."""
    random = np.random.default_rng(seed)
    times = np.maximum(delays.drawn(random, (steps, workers)), 0)
    times.sort(axis=1)
    mean = float(times.mean())
    whole = float(times[:, -1].mean())
    progress(0.2)
    rows = [Row("synchronous", delays.waited(workers), whole, workers / whole, 1 - mean / whole)]
    if backup:
        needed = workers - backup
        early = float(times[:, needed - 1].mean())
        worked = float(times[:, :needed].sum() / steps)
        rows.append(
            Row(
                f"{backup} backup",
                delays.waited(workers, backup),
                early,
                needed / early,
                1 - worked / (workers * early),
            )
        )
    rounds = max(1, steps // local_steps)
    sums = np.zeros((rounds, workers))
    for _ in range(local_steps):
        sums += np.maximum(delays.drawn(random, sums.shape), 0)
    each = float(sums.max(axis=1).mean()) / local_steps
    progress(0.5)
    expected = delays.waited(workers) if local_steps == 1 else math.nan
    rows.append(Row(f"{local_steps} local steps", expected, each, workers / each, 1 - mean / each))
    span, stale = asynchronous(delays, workers, steps * workers, random)
    progress(1.0)
    rows.append(Row("asynchronous", 1 / workers, span, 1 / span, 0.0, stale))
    return rows


def asynchronous(
    delays: Delays, workers: int, updates: int, random: np.random.Generator
) -> tuple[float, float]:
    """Return the time between updates and the mean staleness, where nobody waits."""
    times = np.maximum(delays.drawn(random, (updates + workers,)), 0)
    running = [(float(times[w]), w, 0) for w in range(workers)]
    heapq.heapify(running)
    now, stale = 0.0, 0
    for version in range(updates):
        now, worker, base = running[0]
        stale += version - base
        later = now + float(times[workers + version])
        heapq.heapreplace(running, (later, worker, version + 1))
    return now / updates, stale / updates
