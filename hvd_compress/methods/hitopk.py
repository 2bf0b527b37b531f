"""HiTopKComm with MSTopK (Shi et al., Towards Scalable Distributed Training of Deep Learning on
Public Cloud Clusters, MLSys 2021)."""

from __future__ import annotations

import dataclasses
import functools

from hvd_compress import operators
from hvd_compress.aggregators import nodes_top_k
from hvd_compress.chain import Chain, chain
from hvd_compress.methods.chained import Chained
from hvd_compress.schedules import Density


@dataclasses.dataclass(frozen=True)
class HiTopK(Chained, name="hitopk"):
    """Add up dense gradients inside each node, and send the largest k = ceil(density * n) sums of
    each node to the others; see :class:`hvd_compress.blocks.nodes_top_k`.

    State: ``owner_residual``.  Sent: inside a node as much as by a dense sum; between nodes, by all
    ranks of a node together, k values and k packed indices to each other node.

    Options:
        density: fraction of elements to send between nodes, or a schedule.
        ranks_per_node: so many consecutive ranks make a node.  1, every rank a node of its own, is
            MSTopK.
        rounds: how often MSTopK halves its interval.
        indices: on the wire, "packed", about log2(n / k) + 1.5 bits each, or "int32".

    Reference: Shi et al., MLSys 2021.  Differs from it in: error feedback keeps the node's sums
    with the rank that selects among them; the steps inside a node are one all-to-all and one
    exchange with its ranks.

    >>> world = World(HiTopK(density=0.25, ranks_per_node=2), size=4)
    >>> world.exchange([np.array([rank, 1.0, 8.0, rank]) for rank in range(4)])[0].mean
    array([1.25, 0.5 , 8.  , 0.  ])
    """

    reference = "Shi et al., MLSys 2021"

    density: Density = 0.001
    ranks_per_node: int = 1
    rounds: int = 30
    indices: str = "packed"

    @functools.cached_property
    def blocks(self) -> Chain:
        select = operators.ms_top_k(self.density, self.rounds)
        return chain(via=nodes_top_k(select, self.ranks_per_node, self.indices))
