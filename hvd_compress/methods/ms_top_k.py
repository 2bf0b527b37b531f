"""MSTopK (Shi et al., Towards Scalable Distributed Training of Deep Learning, MLSys 2021)."""

from __future__ import annotations

import dataclasses
import functools

from hvd_compress import operators
from hvd_compress.aggregators import allgather
from hvd_compress.chain import Chain, chain
from hvd_compress.methods.chained import Chained
from hvd_compress.schedules import Density
from hvd_compress.transforms import error_feedback


@dataclasses.dataclass(frozen=True)
class MSTopK(Chained, name="mstopk"):
    """Send k = ceil(density * n) of the largest elements, found by halving an interval; keep the
    rest for later.

    Which elements are among the k is exact but for ties and near ties at the threshold.

    State: ``residual``.  Sent: k values and k packed indices a tensor.

    Options:
        density: fraction of elements to send, or a schedule.
        rounds: how often the interval is halved.
        values: "float32" or "float16" on the wire.
        indices: on the wire, "packed", about log2(n / k) + 1.5 bits each, or "int32".

    Reference: Shi et al., MLSys 2021.  Differs from it in: elements are gathered by one allgather
    of all ranks, not in a hierarchy of nodes; see also ``operators/ms_top_k.py``.

    >>> world = World(MSTopK(density=0.5), size=1)
    >>> world.exchange([np.array([4.0, 1.0, 0.0, 2.0])])[0].mean
    array([4., 0., 0., 2.])
    """

    reference = "Shi et al., MLSys 2021"

    density: Density = 0.001
    rounds: int = 30
    values: str = "float32"
    indices: str = "packed"

    @functools.cached_property
    def blocks(self) -> Chain:
        via = allgather(
            operators.ms_top_k(self.density, self.rounds), self.values, indices=self.indices
        )
        return chain(error_feedback(), via=via)
