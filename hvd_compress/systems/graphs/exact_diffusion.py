"""Exact diffusion, NIDS and P2D2: diffusion without its bias, for the same bytes."""

from __future__ import annotations

import dataclasses

from hvd_compress.base import Array
from hvd_compress.config import converted
from hvd_compress.systems.graphs.base import DecentralizedMethod, Network, Update, Vectors, mix
from hvd_compress.systems.graphs.proximal import Proximal
from hvd_compress.systems.graphs.topologies import Cycle, Topology, as_topology


@dataclasses.dataclass(frozen=True)
class ExactDiffusion(DecentralizedMethod, name="exact_diffusion"):
    """Adapt, correct, combine, with the lazy matrix Wt = (I + W) / 2::

        psi+ = x - mu grad(x);  phi = psi+ + z - psi;  z+ = Wt phi;  x+ = prox_{mu r}(z+)
        psi_0 = z_0 = x_0

    State: ``correction`` = z - psi.  Sent: a vector to each neighbour, every step, as in diffusion.

    Without gradient noise it converges to the minimum of the mean of all ranks' functions, linearly
    for strongly convex ones, if mu < 2 / L, whatever the graph.  Noise is averaged a little less
    well than by diffusion where the graph is well connected, since Wt mixes more slowly than W.

    Args:
        topology: undirected; see :class:`Diffusion`.
        prox: r, such as ``l1(0.05)``, for P2D2; without it z is x.

    Differs from the paper in: P2D2 has Wt as its matrix.  Its formula is recalled; it was compared
    with Prox-LEAD, whose iterates it gives where that does not compress (gamma = 1).

    Reference: Yuan, Ying, Zhao, Sayed, IEEE TSP 2019; Yuan, Alghunaim, Ying, Sayed, TSP 2020;
    Alghunaim, Yuan, Sayed, NeurIPS 2019 (P2D2).

    >>> from hvd_compress.systems.graphs import simulate
    >>> gradient = lambda rank, x, step: x - rank  # together, ranks 0 to 3 have their best at 1.5
    >>> simulate(ExactDiffusion(), gradient, [[0.0]] * 4, steps=500, rate=0.1).ravel().round(3)
    array([1.5, 1.5, 1.5, 1.5])
    """

    reference = (
        "Yuan, Ying, Zhao, Sayed, IEEE TSP 2019; Yuan, Alghunaim, Ying, Sayed, TSP 2020; "
        "Alghunaim, Yuan, Sayed, NeurIPS 2019 (P2D2)"
    )
    symmetric = True

    topology: Topology = dataclasses.field(default=Cycle(), metadata=converted(as_topology))
    prox: Proximal | None = None

    def start(self, x: Array) -> Vectors:
        return {"correction": x * 0}

    def update(self, x: Array, local: Array, state: Vectors, network: Network) -> Update:
        return corrected(local, state, network)


@dataclasses.dataclass(frozen=True)
class NIDS(DecentralizedMethod, name="nids"):
    """NIDS, or D2: :class:`ExactDiffusion` whose first step is ``z_1 = x_0 - mu grad(x_0)``,
    without mixing; the same limit, on another way there.  It has the same state.

    Args:
        topology, prox: as for :class:`ExactDiffusion`.

    Reference: Li, Shi, Yan, IEEE TSP 2019; Tang et al. (D2), ICML 2018.

    >>> from hvd_compress.systems.graphs import simulate
    >>> gradient = lambda rank, x, step: x - rank  # together, ranks 0 to 3 have their best at 1.5
    >>> simulate(NIDS(), gradient, [[0.0]] * 4, steps=500, rate=0.1).ravel().round(3)
    array([1.5, 1.5, 1.5, 1.5])
    """

    reference = "Li, Shi, Yan, IEEE TSP 2019; Tang et al. (D2), ICML 2018"
    symmetric = True

    topology: Topology = dataclasses.field(default=Cycle(), metadata=converted(as_topology))
    prox: Proximal | None = None

    def start(self, x: Array) -> Vectors:
        return {"correction": x * 0}

    def update(self, x: Array, local: Array, state: Vectors, network: Network) -> Update:
        if network.step == 1:
            return local, state
        return (yield from corrected(local, state, network))


def corrected(local: Array, state: Vectors, network: Network) -> Update:
    """Correct and combine: a step of exact diffusion, without the proximal map."""
    _, mixed = yield from mix(local + state["correction"], network.lazy())
    return mixed, {"correction": mixed - local}
