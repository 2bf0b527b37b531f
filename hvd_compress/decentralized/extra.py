"""EXTRA: the first decentralised method that is exact with a constant step."""

from __future__ import annotations

import dataclasses

from hvd_compress.base import Array
from hvd_compress.config import converted
from hvd_compress.decentralized.base import DecentralizedMethod, Network, Update, Vectors, mix
from hvd_compress.decentralized.topologies import Cycle, Topology, as_topology


@dataclasses.dataclass(frozen=True)
class EXTRA(DecentralizedMethod, name="extra"):
    """With Wt = (I + W) / 2 and gradients g::

        x_1 = W x_0 - mu g_0;  x_(k+2) = (I + W) x_(k+1) - Wt x_k - mu (g_(k+1) - g_k)

    State: ``kept`` = Wt x_k - mu g_k, at first x_0.  Sent: a vector to each neighbour, every step.

    It converges for mu < (1 + lambda_min(W)) / L, a bound that is less than that of exact diffusion
    and depends on the graph.

    Args:
        topology: undirected; see :class:`Diffusion`.
    """

    reference = "Shi, Ling, Wu, Yin, SIAM J. Optimization 2015"
    symmetric = True

    topology: Topology = dataclasses.field(default=Cycle(), metadata=converted(as_topology))

    def start(self, x: Array) -> Vectors:
        return {"kept": x}

    def update(self, x: Array, local: Array, state: Vectors, network: Network) -> Update:
        _, mixed = yield from mix(x, network)
        step = local - x
        return x + mixed - state["kept"] + step, {"kept": (x + mixed) / 2 + step}
