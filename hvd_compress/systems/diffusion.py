"""Diffusion and consensus, methods whose correction removes their bias for the same bytes, and
gradient tracking."""

from __future__ import annotations

import dataclasses

from hvd_compress.backends import backend_of
from hvd_compress.base import Array
from hvd_compress.systems.decentralized import DecentralizedMethod, Update, Vectors, l1, mix
from hvd_compress.systems.topologies import Neighborhood


@dataclasses.dataclass(frozen=True)
class Diffusion(DecentralizedMethod, name="diffusion"):
    """Train over a graph: step locally, then mix parameters with the neighbours'::

        method=hvd.Diffusion("cycle")

    A step is ``psi = x - mu grad(x);  x+ = W psi`` (adapt, then combine: ATC).

    State: none.  Sent: a vector to each neighbour, every step.

    If the ranks' data differ, a constant rate leaves x at a distance of order mu b / (1 - lambda)
    from the minimum.  There b^2 is the mean squared norm of the ranks' gradients there, and lambda
    the second eigenvalue of W.  :class:`ExactDiffusion` has no such bias.

    Args:
        topology: a topology, its name such as "cycle" or "grid:rows=4", pairs of ranks, or a matrix
            of weights; see ``as_topology``.

    Reference: Cattivelli, Sayed, IEEE TSP 2010.

    >>> from hvd_compress.systems.graphs import simulate
    >>> gradient = lambda rank, x, step: x - rank  # together, ranks 0 to 3 have their best at 1.5
    >>> simulate(Diffusion(), gradient, [[0.0]] * 4, steps=500, rate=0.1).ravel().round(3)
    array([1.465, 1.44 , 1.56 , 1.535])
    """

    def update(self, x: Array, local: Array, state: Vectors, network: Neighborhood) -> Update:
        _, mixed = yield from mix(local, network)
        return mixed, {}


@dataclasses.dataclass(frozen=True)
class DGD(DecentralizedMethod, name="dgd"):
    """Train over a graph: mix parameters, then step along the old gradient: ``x+ = W x - mu
    grad(x)``::

        method=hvd.DGD("cycle")

    Decentralised gradient descent, or consensus; stable for mu <= (1 + lambda_min(W)) / L.

    Args:
        topology: as for :class:`Diffusion`.

    Reference: Nedic, Ozdaglar, IEEE TAC 2009.

    >>> from hvd_compress.systems.graphs import simulate
    >>> gradient = lambda rank, x, step: x - rank  # together, ranks 0 to 3 have their best at 1.5
    >>> simulate(DGD(), gradient, [[0.0]] * 4, steps=500, rate=0.1).ravel().round(3)
    array([1.335, 1.404, 1.596, 1.665])
    """

    def update(self, x: Array, local: Array, state: Vectors, network: Neighborhood) -> Update:
        _, mixed = yield from mix(x, network)
        return mixed + (local - x), {}


@dataclasses.dataclass(frozen=True)
class ExactDiffusion(DecentralizedMethod, name="exact_diffusion"):
    """Train over a graph, exactly, for the bytes of diffusion::

        method=hvd.ExactDiffusion("cycle")

    Adapt, correct, combine, with the lazy matrix Wt = (I + W) / 2 and psi_0 = z_0 = x_0::

        psi+ = x - mu grad(x);  phi = psi+ + z - psi;  z+ = Wt phi;  x+ = prox_{mu r}(z+)

    State: ``correction`` = z - psi.  Without gradient noise it converges for mu < 2 / L, whatever
    the graph, and linearly for strongly convex functions.  Noise is averaged a little less well
    than by diffusion where the graph is well connected.

    Args:
        topology: undirected; see :class:`Diffusion`.
        prox: r, such as ``l1(0.05)``, for P2D2; without it z is x.  P2D2's formula is recalled,
            with Wt as its matrix; it was compared with Prox-LEAD for gamma = 1.

    Reference: Yuan, Ying, Zhao, Sayed, IEEE TSP 2019; Alghunaim, Yuan, Sayed, NeurIPS 2019 (P2D2).

    >>> from hvd_compress.systems.graphs import simulate
    >>> gradient = lambda rank, x, step: x - rank  # together, ranks 0 to 3 have their best at 1.5
    >>> simulate(ExactDiffusion(), gradient, [[0.0]] * 4, steps=500, rate=0.1).ravel().round(3)
    array([1.5, 1.5, 1.5, 1.5])
    """

    symmetric = True
    keys = ("correction",)

    prox: l1 | None = None

    def update(self, x: Array, local: Array, state: Vectors, network: Neighborhood) -> Update:
        sent, total = yield from mix(local + state["correction"], network)
        mixed = (sent + total) / 2
        return mixed, {"correction": mixed - local}


@dataclasses.dataclass(frozen=True)
class EXTRA(DecentralizedMethod, name="extra"):
    """Train over a graph, exactly, by gradient descent with a correction::

        method=hvd.EXTRA("cycle")

    With Wt = (I + W) / 2 and gradients g::

        y_1 = W x_0 - mu g_0;  y_(k+2) = W x_(k+1) + y_(k+1) - Wt x_k - mu (g_(k+1) - g_k)
        x_k = prox_{mu r}(y_k)

    State: ``correction`` c: c_(k+1) = c_k + (W - I) x_k / 2, c_0 = 0.  It converges for mu < (1 +
    lambda_min(W)) / L, a smaller bound than exact diffusion's, which depends on the graph.

    Args:
        topology: undirected; see :class:`Diffusion`.
        prox: r, such as ``l1(0.05)``, for PG-EXTRA.

    Reference: Shi, Ling, Wu, Yin, SIAM J. Optimization 2015; IEEE TSP 2015 (PG-EXTRA).

    >>> from hvd_compress.systems.graphs import simulate
    >>> gradient = lambda rank, x, step: x - rank  # together, ranks 0 to 3 have their best at 1.5
    >>> simulate(EXTRA(), gradient, [[0.0]] * 4, steps=500, rate=0.1).ravel().round(3)
    array([1.5, 1.5, 1.5, 1.5])
    """

    symmetric = True
    keys = ("correction",)

    prox: l1 | None = None

    def update(self, x: Array, local: Array, state: Vectors, network: Neighborhood) -> Update:
        _, mixed = yield from mix(x, network)
        correction = state["correction"]
        new = {"correction": correction + (mixed - x) / 2}
        return mixed + correction + (local - x), new


@dataclasses.dataclass(frozen=True)
class GradientTracking(DecentralizedMethod, name="gradient_tracking"):
    """Train over a graph, exactly, by mixing an estimate of the mean gradient, too (DIGing)::

        method=hvd.GradientTracking("one_peer")

    A step is ``x+ = W x - mu y;  y+ = W y + g+ - g`` with y_0 = g_0.

    State: ``tracker``, -mu W y, and ``step``, -mu g.  Sent: two vectors to each neighbour, every
    step.  It works over directed graphs with doubly stochastic weights, and over graphs that
    change.

    Args:
        topology: see :class:`Diffusion`.

    Reference: Nedic, Olshevsky, Shi, SIAM J. Optimization 2017.

    >>> from hvd_compress.systems.graphs import simulate
    >>> gradient = lambda rank, x, step: x - rank  # together, ranks 0 to 3 have their best at 1.5
    >>> simulate(GradientTracking(), gradient, [[0.0]] * 4, steps=500, rate=0.1).ravel().round(3)
    array([1.5, 1.5, 1.5, 1.5])
    """

    keys = ("tracker", "step")

    def update(self, x: Array, local: Array, state: Vectors, network: Neighborhood) -> Update:
        step = local - x
        tracker = state["tracker"] + step - state["step"]
        xp = backend_of(x)
        _, both = yield from mix(xp.concat([x, tracker]), network)
        mixed, mixed_tracker = xp.split(both, [xp.size(x)] * 2)
        return mixed + tracker, {"tracker": mixed_tracker, "step": step}
