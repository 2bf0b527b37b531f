"""Gradient tracking: beside the parameters, ranks mix an estimate of the mean gradient."""

from __future__ import annotations

import dataclasses

from hvd_compress.backends import backend_of
from hvd_compress.base import Array
from hvd_compress.systems.graphs.base import DecentralizedMethod, Neighborhood, Update, Vectors, mix


@dataclasses.dataclass(frozen=True)
class GradientTracking(DecentralizedMethod, name="gradient_tracking"):
    """DIGing::

        x+ = W x - mu y;    y+ = W y + g+ - g        y_0 = g_0

    State: ``tracker``, -mu W y, and ``step``, -mu g.  Sent: two vectors to each neighbour, every
    step.

    Exact, also over directed graphs whose weights are doubly stochastic, and over graphs that
    change.

    Args:
        topology: see :class:`Diffusion`.

    Reference: Nedic, Olshevsky, Shi, SIAM J. Optimization 2017.

    >>> from hvd_compress.systems.graphs import simulate
    >>> gradient = lambda rank, x, step: x - rank  # together, ranks 0 to 3 have their best at 1.5
    >>> simulate(GradientTracking(), gradient, [[0.0]] * 4, steps=500, rate=0.1).ravel().round(3)
    array([1.5, 1.5, 1.5, 1.5])
    """

    def start(self, x: Array) -> Vectors:
        return {"tracker": x * 0, "step": x * 0}

    def update(self, x: Array, local: Array, state: Vectors, network: Neighborhood) -> Update:
        step = local - x
        tracker = state["tracker"] + step - state["step"]
        xp = backend_of(x)
        _, both = yield from mix(xp.concat([x, tracker]), network)
        mixed, mixed_tracker = xp.split(both, [xp.size(x)] * 2)
        return mixed + tracker, {"tracker": mixed_tracker, "step": step}
