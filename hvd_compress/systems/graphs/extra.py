"""EXTRA and PG-EXTRA: the first decentralised methods that are exact with a constant step."""

from __future__ import annotations

import dataclasses

from hvd_compress.base import Array
from hvd_compress.config import converted
from hvd_compress.systems.graphs.base import DecentralizedMethod, Network, Update, Vectors, mix
from hvd_compress.systems.graphs.proximal import Proximal
from hvd_compress.systems.graphs.topologies import Cycle, Topology, as_topology


@dataclasses.dataclass(frozen=True)
class EXTRA(DecentralizedMethod, name="extra"):
    """With Wt = (I + W) / 2 and gradients g::

        y_1 = W x_0 - mu g_0;  y_(k+2) = W x_(k+1) + y_(k+1) - Wt x_k - mu (g_(k+1) - g_k)
        x_k = prox_{mu r}(y_k)

    which is ``y_(k+1) = W x_k + c_k - mu g_k``, ``c_(k+1) = c_k + (W - I) x_k / 2``, c_0 = 0.

    State: ``correction`` = c.  Sent: a vector to each neighbour, every step.

    It converges for mu < (1 + lambda_min(W)) / L, a bound that is less than that of exact diffusion
    and depends on the graph.

    Args:
        topology: undirected; see :class:`Diffusion`.
        prox: r, such as ``l1(0.05)``, for PG-EXTRA.

    Reference: Shi, Ling, Wu, Yin, SIAM J. Optimization 2015; IEEE TSP 2015 (PG-EXTRA).

    >>> from hvd_compress.systems.graphs import simulate
    >>> gradient = lambda rank, x, step: x - rank  # together, ranks 0 to 3 have their best at 1.5
    >>> simulate(EXTRA(), gradient, [[0.0]] * 4, steps=500, rate=0.1).ravel().round(3)
    array([1.5, 1.5, 1.5, 1.5])
    """

    reference = "Shi, Ling, Wu, Yin, SIAM J. Optimization 2015; IEEE TSP 2015 (PG-EXTRA)"
    symmetric = True

    topology: Topology = dataclasses.field(default=Cycle(), metadata=converted(as_topology))
    prox: Proximal | None = None

    def start(self, x: Array) -> Vectors:
        return {"correction": x * 0}

    def update(self, x: Array, local: Array, state: Vectors, network: Network) -> Update:
        _, mixed = yield from mix(x, network)
        correction = state["correction"]
        new = {"correction": correction + (mixed - x) / 2}
        return mixed + correction + (local - x), new
