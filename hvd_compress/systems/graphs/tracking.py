"""Gradient tracking: beside the parameters, ranks mix an estimate of the mean gradient."""

from __future__ import annotations

import dataclasses

from hvd_compress.backends import backend_of
from hvd_compress.base import Array
from hvd_compress.config import check_choice, converted
from hvd_compress.systems.graphs.base import DecentralizedMethod, Neighborhood, Update, Vectors, mix
from hvd_compress.systems.graphs.topologies import StaticExponential, Topology, as_topology


@dataclasses.dataclass(frozen=True)
class GradientTracking(DecentralizedMethod, name="gradient_tracking"):
    """DIGing, and its form that adapts before it combines::

        form="diging":  x+ = W x - mu y;    y+ = W y + g+ - g        y_0 = g_0
        form="atc":     x+ = W (x - mu y);  y+ = W (y + g+ - g)

    State: ``tracker``, -mu y mixed ("diging") or as it is ("atc"), and ``step``, -mu g.  Sent: two
    vectors to each neighbour, every step; with "atc" in two rounds one after the other.

    Exact, also over directed graphs whose weights are doubly stochastic, and over graphs that
    change.

    Args:
        topology: see :class:`Diffusion`.
        form: "diging" or "atc", see above.

    Reference: Nedic, Olshevsky, Shi, SIAM J. Optimization 2017; Xu et al., CDC 2015 (ATC).

    >>> from hvd_compress.systems.graphs import simulate
    >>> gradient = lambda rank, x, step: x - rank  # together, ranks 0 to 3 have their best at 1.5
    >>> simulate(GradientTracking(), gradient, [[0.0]] * 4, steps=500, rate=0.1).ravel().round(3)
    array([1.5, 1.5, 1.5, 1.5])
    """

    form: str = "diging"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("form", self.form, ("diging", "atc"))

    def start(self, x: Array) -> Vectors:
        return {"tracker": x * 0, "step": x * 0}

    def update(self, x: Array, local: Array, state: Vectors, network: Neighborhood) -> Update:
        step = local - x
        tracker = state["tracker"] + step - state["step"]
        if self.form == "atc":
            if network.step > 1:
                _, tracker = yield from mix(tracker, network)
            _, mixed = yield from mix(x + tracker, network)
            return mixed, {"tracker": tracker, "step": step}
        xp = backend_of(x)
        _, both = yield from mix(xp.concat([x, tracker]), network)
        mixed, mixed_tracker = xp.split(both, [xp.size(x)] * 2)
        return mixed + tracker, {"tracker": mixed_tracker, "step": step}


@dataclasses.dataclass(frozen=True)
class PushDIGing(DecentralizedMethod, name="push_diging"):
    """Gradient tracking over any strongly connected directed graph, by push-sum.  C is column
    stochastic: a rank divides what it has among those that it sends to and itself::

        u+ = C (u - mu y);  v+ = C v;  x+ = u+ / v+;  y+ = C y + g+ - g      v_0 = 1, y_0 = g_0

    State: ``tracker``, -mu C y; ``step``, -mu g; ``mass``, v, whose elements are equal.  Sent: u, y
    and v in one message, two vectors and a number, to each rank that this one sends to.

    Args:
        topology: see :class:`Diffusion`; directed ones need not be balanced.

    Reference: Nedic, Olshevsky, Shi, SIAM J. Optimization 2017.

    >>> from hvd_compress.systems.graphs import simulate
    >>> gradient = lambda rank, x, step: x - rank  # together, ranks 0 to 3 have their best at 1.5
    >>> method = PushDIGing("exponential")
    >>> simulate(method, gradient, [[0.0]] * 4, steps=500, rate=0.1).ravel().round(3)
    array([1.5, 1.5, 1.5, 1.5])
    """

    push = True

    topology: Topology = dataclasses.field(
        default=StaticExponential(), metadata=converted(as_topology)
    )

    def start(self, x: Array) -> Vectors:
        return {"tracker": x * 0, "step": x * 0, "mass": backend_of(x).full_like(x, 1.0)}

    def update(self, x: Array, local: Array, state: Vectors, network: Neighborhood) -> Update:
        xp = backend_of(x)
        n, step, mass = xp.size(x), local - x, state["mass"]
        tracker = state["tracker"] + step - state["step"]
        message = xp.concat([x * mass + tracker, tracker, mass[:1]])
        _, mixed = yield from mix(message, network)
        u, tracker, v = xp.split(mixed, [n, n, min(n, 1)])
        mass = xp.full_like(x, 1.0) * v if n else mass
        return u / mass, {"tracker": tracker, "step": step, "mass": mass}
