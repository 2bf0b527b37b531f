"""Top-k with error feedback (Aji and Heafield, EMNLP 2017; Stich et al., NeurIPS 2018)."""

from __future__ import annotations

import dataclasses
import functools

from hvd_compress import operators
from hvd_compress.chain import Chain, chain
from hvd_compress.config import check_choice, converted
from hvd_compress.meetings import allgather
from hvd_compress.methods.chained import Chained
from hvd_compress.methods.rows import SendsRows, checked_rows
from hvd_compress.schedules import Density
from hvd_compress.transforms import error_feedback


@dataclasses.dataclass(frozen=True)
class TopK(SendsRows, Chained, name="topk"):
    """Send the k = ceil(density * n) elements of largest magnitude, keep the rest for later.

    State: ``residual``.  Sent: k values and k packed indices a tensor.  The optimizer's momentum
    is applied to the average, so it comes late for elements in the residual; :class:`DGC` corrects
    that.

    Options:
        density: fraction of elements to send, or a schedule.
        values: "float32" or "float16" on the wire.
        indices: on the wire, "packed", about log2(n / k) + 1.5 bits each, or "int32".
        algorithm: how entries are added up: "allgather", or over MPI one of those of
            :class:`hvd_compress.blocks.allgather`.
        error_feedback: without it, what is not sent is lost; for studies only.
        rows: how rows of sparse gradients are sent, such as "int8" or "top:0.1"; see
            :mod:`hvd_compress.methods.rows`.

    Reference: Aji and Heafield, EMNLP 2017; Stich et al., NeurIPS 2018.

    Each rank keeps what it has not sent:

    >>> world = World(TopK(density=0.25), size=2)
    >>> rank_0, rank_1 = np.array([4.0, 1.0, 0.0, 2.0]), np.array([1.0, 0.0, 6.0, 3.0])
    >>> world.exchange([rank_0, rank_1])[0].mean
    array([2., 0., 3., 0.])
    >>> [state["residual"] for state in world.states["tensor"]]
    [array([0., 1., 0., 2.]), array([1., 0., 0., 3.])]
    """

    reference = "Aji and Heafield, EMNLP 2017"

    density: Density = 0.01
    values: str = "float32"
    error_feedback: bool = True
    algorithm: str = "allgather"
    indices: str = "packed"
    rows: str = dataclasses.field(default="whole", metadata=converted(checked_rows))

    def __post_init__(self) -> None:
        check_choice("error_feedback", self.error_feedback, (True, False))
        super().__post_init__()

    @functools.cached_property
    def blocks(self) -> Chain:
        via = allgather(operators.top_k(self.density), self.values, self.algorithm, self.indices)
        return chain(error_feedback(), via=via) if self.error_feedback else chain(via=via)
