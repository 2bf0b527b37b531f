"""Ranks that each minimise a function of one number, in one process."""

from __future__ import annotations

import numpy as np

from hvd_compress.systems import Ranks


class Quadratics:
    """f_i = h_i (x - b_i)^2 / 2, local steps of gradient descent."""

    def __init__(self, method, starts, *, h=1.0, b=0.0, lr=0.1, gradient=None, **options):
        size = len(starts)
        self.h, self.b = np.broadcast_to(h, size), np.broadcast_to(b, size)
        self.lr, self.gradient = lr, gradient
        self.world = Ranks(method, size, **options)
        self.x = [{"x": np.array([start], float)} for start in starts]

    def loss(self, rank):
        return float(self.h[rank] * (self.x[rank]["x"][0] - self.b[rank]) ** 2 / 2)

    def _gradient(self, rank, x):
        if self.gradient is not None:
            return self.gradient(x)
        return self.h[rank] * (x - self.b[rank])

    def step(self, losses=None, **known):
        losses = [self.loss(rank) for rank in range(self.world.size)] if losses is None else losses
        gradients = [self._gradient(rank, own["x"]) for rank, own in enumerate(self.x)]
        pulled = self.world.before_step(self.x, losses=losses, rates={"x": self.lr}, **known)
        self.x = [{"x": own["x"] - self.lr * g} for own, g in zip(pulled, gradients, strict=True)]
        self.x = self.world.after_step(self.x)
        return self.values

    def run(self, steps):
        for _ in range(steps):
            self.step()
        return self.values

    @property
    def values(self):
        return [float(own["x"][0]) for own in self.x]
