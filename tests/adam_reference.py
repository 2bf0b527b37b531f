"""1-bit Adam and its relatives in NumPy, from the formulas: nothing of the package is used."""

from __future__ import annotations

import dataclasses

import numpy as np


def one_bit(x: np.ndarray, norm: str = "l1") -> np.ndarray:
    """The values that one bit per element and a scale stand for."""
    if not x.size:
        return x
    scale = np.abs(x).mean() if norm == "l1" else np.sqrt(np.square(x).mean())
    return np.where(x >= 0, scale, -scale)


class OneBitMean:
    """The mean over ranks of flat arrays, through the owners of shards as equal as can be."""

    def __init__(self, n: int, ranks: int, norm: str = "l1") -> None:
        bounds = [n * rank // ranks for rank in range(ranks + 1)]
        self.shards = [slice(*bounds[rank : rank + 2]) for rank in range(ranks)]
        self.worker_errors = np.zeros((ranks, n))
        self.owner_errors = np.zeros(n)
        self.norm = norm

    def __call__(self, arrays: list[np.ndarray]) -> np.ndarray:
        with_errors = np.array(arrays) + self.worker_errors
        mean = np.empty_like(self.owner_errors)
        for shard in self.shards:
            sent = np.array([one_bit(x[shard], self.norm) for x in with_errors])
            self.worker_errors[:, shard] = with_errors[:, shard] - sent
            total = sent.sum(0) + self.owner_errors[shard]
            told = one_bit(total, self.norm)
            self.owner_errors[shard] = total - told
            mean[shard] = told / len(arrays)
        return mean


def _mean(arrays: list[np.ndarray]) -> np.ndarray:
    return sum(arrays) / len(arrays)


@dataclasses.dataclass
class Options:
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    bias_correction: bool = True
    freeze_step: int = 100_000
    norm: str = "l1"
    compressed: bool = True  # or sums throughout


class OneBitAdam:
    """One parameter on all ranks."""

    def __init__(self, p: np.ndarray, ranks: int, options: Options) -> None:
        self.p, self.options = p.astype(np.float64).copy(), options
        self.m, self.v = np.zeros(p.size), np.zeros(p.size)
        self.steps = self.variance_steps = 0
        self.mean = OneBitMean(p.size, ranks, options.norm)

    def step(self, gradients: list[np.ndarray]) -> np.ndarray:
        o, flat = self.options, [g.astype(np.float64).reshape(-1) for g in gradients]
        self.steps += 1
        if self.steps <= o.freeze_step:
            g = sum(flat) / len(flat)
            self.m = o.beta1 * self.m + (1 - o.beta1) * g
            self.v = o.beta2 * self.v + (1 - o.beta2) * g * g
            self.variance_steps = self.steps
        else:
            momenta = [o.beta1 * self.m + (1 - o.beta1) * g for g in flat]
            self.m = self.mean(momenta) if o.compressed else sum(momenta) / len(momenta)
        m, v = self.m, self.v
        if o.bias_correction:
            m = m / (1 - o.beta1**self.steps)
            v = v / (1 - o.beta2**self.variance_steps)
        update = np.zeros_like(m)
        known = v > 0
        update[known] = m[known] / (np.sqrt(v[known]) + o.eps)
        update += o.weight_decay * self.p.reshape(-1)
        self.p = self.p - o.lr * update.reshape(self.p.shape)
        return self.p


class OneBitLAMB(OneBitAdam):
    """The same with coefficients: of every step, and of the steps before the freeze."""

    COEFFICIENTS, FACTORS, CHANGE = (0.01, 10.0), (0.5, 4.0), 0.1

    def __init__(self, p: np.ndarray, ranks: int, options: Options) -> None:
        super().__init__(p, ranks, options)
        self.coefficient: float | None = None
        self.fresh, self.factor = np.zeros(0), 1.0

    def step(self, gradients: list[np.ndarray]) -> np.ndarray:
        o, p, m = self.options, self.p.reshape(-1), self.m
        # The step of Adam without decay, for its state and direction.
        self.options = dataclasses.replace(o, lr=1.0, weight_decay=0.0)
        adams = p - super().step(gradients).reshape(-1)
        self.options = o
        u = adams + o.weight_decay * p
        if self.steps <= o.freeze_step:
            c = float(np.clip(np.linalg.norm(p) / np.linalg.norm(u), *self.COEFFICIENTS))
            a = c if self.coefficient is None else self.coefficient
            self.coefficient = 0.9 * a + 0.1 * c
            self.fresh = self.v.copy()
        else:
            g = (self.m - o.beta1 * m) / (1 - o.beta1)
            self.fresh = o.beta2 * self.fresh + (1 - o.beta2) * g * g
            c2 = 1 - o.beta2**self.variance_steps if o.bias_correction else 1.0
            known = self.v > 0
            roots = [np.sqrt(v[known] / c2) + o.eps for v in (self.v, self.fresh)]
            share = min(1.0, np.linalg.norm(adams) / np.linalg.norm(u))
            factor = np.clip(share * (roots[0] / roots[1]).max() + 1 - share, *self.FACTORS)
            bounds = self.factor * (1 - self.CHANGE), self.factor * (1 + self.CHANGE)
            self.factor = float(np.clip(factor, *bounds))
            c = self.coefficient * self.factor
        self.p = (p - o.lr * c * u).reshape(self.p.shape)
        return self.p


def variance_steps(updates: int, last: int) -> list[int]:
    """As the released code counts: with a counter that starts again when the interval doubles."""
    interval, counter, found = 1, 0, []
    for step in range(1, last + 1):
        if step % interval == 0:
            found.append(step)
            counter += 1
            if counter == updates:
                counter, interval = 0, 2 * interval
    return found


class ZeroOneAdam:
    """One parameter on all ranks, each with a copy of its own in the local steps, whose changes are
    undone before they are synchronized."""

    def __init__(
        self, p: np.ndarray, ranks: int, options: Options, updates: int, scaler: int, clipper: int
    ) -> None:
        self.options, self.shape = options, p.shape
        self.p = [p.reshape(-1).astype(np.float64).copy() for _ in range(ranks)]
        self.m = [np.zeros(p.size) for _ in range(ranks)]
        self.u = [np.zeros(p.size) for _ in range(ranks)]
        self.v = np.zeros(p.size)
        self.rate, self.steps, self.variance_steps = 0.0, 0, 0
        self.of_gradients, self.of_buffers = (
            OneBitMean(p.size, ranks, options.norm) if options.compressed else _mean
            for _ in range(2)
        )
        self.at = variance_steps(updates, options.freeze_step)
        self.scaler, self.clipper = scaler, clipper
        self.interval, self.counter = 1, 0

    def step(self, gradients: list[np.ndarray]) -> list[np.ndarray]:
        o, flat = self.options, [g.astype(np.float64).reshape(-1) for g in gradients]
        self.steps += 1
        local = self.steps > o.freeze_step
        if not local and self.steps in self.at:
            g = sum(flat) / len(flat)
            self.v = o.beta2 * self.v + (1 - o.beta2) * g * g
            self.variance_steps += 1
            flat = [g] * len(flat)
        elif not local:
            flat = [self.of_gradients(flat)] * len(flat)
        c1 = 1 - o.beta1**self.steps if o.bias_correction else 1.0
        c2 = 1 - o.beta2**self.variance_steps if o.bias_correction else 1.0
        scale, decay = np.sqrt(self.v / c2) + o.eps, 1 - o.lr * o.weight_decay
        for rank, g in enumerate(flat):
            self.m[rank] = o.beta1 * self.m[rank] + (1 - o.beta1) * g
            update = self.m[rank] / c1 / scale
            self.p[rank] = decay * self.p[rank] - o.lr * update
            self.u[rank] = decay * self.u[rank] + local * o.lr * update
        if not local:
            return self._copies()
        self.rate = decay * self.rate + o.lr
        if self.steps % self.interval == 0:
            mean = self.of_buffers([u * scale for u in self.u])
            for rank, u in enumerate(self.u):
                self.p[rank] = self.p[rank] + u - mean / scale
                self.m[rank] = mean / self.rate * c1
                self.u[rank] = np.zeros_like(u)
            self.rate = 0.0
        self.counter += 1
        if self.counter == self.scaler:
            self.counter, self.interval = 0, min(self.clipper, 2 * self.interval)
        return self._copies()

    def _copies(self) -> list[np.ndarray]:
        return [p.reshape(self.shape) for p in self.p]
