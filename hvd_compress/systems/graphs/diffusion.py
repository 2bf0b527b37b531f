"""Diffusion and consensus: mixing with the neighbours, without a correction of the bias."""

from __future__ import annotations

import dataclasses

from hvd_compress.base import Array
from hvd_compress.config import converted
from hvd_compress.systems.graphs.base import DecentralizedMethod, Network, Update, Vectors, mix
from hvd_compress.systems.graphs.topologies import Cycle, Topology, as_topology


@dataclasses.dataclass(frozen=True)
class Diffusion(DecentralizedMethod, name="diffusion"):
    """Adapt, then combine (ATC): ``psi = x - mu grad(x);  x+ = W psi``.

    State: none.  Sent: a vector to each neighbour, every step.

    With a constant learning rate and ranks whose data differ, x stays a distance of order
    mu b / (1 - lambda) from the minimum, where b^2 is the mean squared norm of the ranks' gradients
    there, and lambda the second eigenvalue of W; :class:`ExactDiffusion` has no such bias.

    Args:
        topology: a topology, its name such as "cycle" or "grid:rows=4", pairs of ranks, or a matrix
            of weights; see ``as_topology``.

    Reference: Cattivelli, Sayed, IEEE TSP 2010.

    >>> from hvd_compress.systems.graphs import simulate
    >>> gradient = lambda rank, x, step: x - rank  # together, ranks 0 to 3 have their best at 1.5
    >>> simulate(Diffusion(), gradient, [[0.0]] * 4, steps=500, rate=0.1).ravel().round(3)
    array([1.465, 1.44 , 1.56 , 1.535])
    """

    reference = "Cattivelli, Sayed, IEEE TSP 2010"

    topology: Topology = dataclasses.field(default=Cycle(), metadata=converted(as_topology))

    def update(self, x: Array, local: Array, state: Vectors, network: Network) -> Update:
        _, mixed = yield from mix(local, network)
        return mixed, {}


@dataclasses.dataclass(frozen=True)
class CTADiffusion(DecentralizedMethod, name="cta_diffusion"):
    """Combine, then adapt: ``phi = W x;  x+ = phi - mu grad(phi)``; see :class:`Diffusion`.

    The parameters of an optimizer are those at which it computes gradients, phi; the x of the
    formula, which is before the mixing, is ``solution``, and the state.  So parameters go the way
    of :class:`Diffusion`.  The first step begins at x, unmixed.

    Args:
        topology: as for :class:`Diffusion`.

    >>> from hvd_compress.systems.graphs import simulate
    >>> gradient = lambda rank, x, step: x - rank  # together, ranks 0 to 3 have their best at 1.5
    >>> simulate(CTADiffusion(), gradient, [[0.0]] * 4, steps=500, rate=0.1).ravel().round(3)
    array([1.319, 1.396, 1.604, 1.681])
    """

    reference = "Cattivelli, Sayed, IEEE TSP 2010"

    topology: Topology = dataclasses.field(default=Cycle(), metadata=converted(as_topology))

    def start(self, x: Array) -> Vectors:
        return {"adapted": x}

    def update(self, x: Array, local: Array, state: Vectors, network: Network) -> Update:
        _, mixed = yield from mix(local, network)
        return mixed, {"adapted": local}

    def solution(self, x: Array, state: Vectors) -> Array:
        return state["adapted"]


@dataclasses.dataclass(frozen=True)
class DGD(DecentralizedMethod, name="dgd"):
    """Decentralised gradient descent, or consensus: ``x+ = W x - mu grad(x)``.

    The same as :class:`Diffusion` but for what is mixed; stable for mu <= (1 + lambda_min(W)) / L.

    Args:
        topology: as for :class:`Diffusion`.

    Reference: Nedic, Ozdaglar, IEEE TAC 2009.

    >>> from hvd_compress.systems.graphs import simulate
    >>> gradient = lambda rank, x, step: x - rank  # together, ranks 0 to 3 have their best at 1.5
    >>> simulate(DGD(), gradient, [[0.0]] * 4, steps=500, rate=0.1).ravel().round(3)
    array([1.335, 1.404, 1.596, 1.665])
    """

    reference = "Nedic, Ozdaglar, IEEE TAC 2009"

    topology: Topology = dataclasses.field(default=Cycle(), metadata=converted(as_topology))

    def update(self, x: Array, local: Array, state: Vectors, network: Network) -> Update:
        _, mixed = yield from mix(x, network)
        return mixed + (local - x), {}
