"""1-bit SGD (Seide, Fu, Droppo, Li, Yu; Interspeech 2014)."""

from __future__ import annotations

import dataclasses
import functools

from hvd_compress.chain import Chain, chain
from hvd_compress.codecs import column_means
from hvd_compress.config import check_choice, converted
from hvd_compress.meetings import allgather, alltoall, dense_until
from hvd_compress.methods.chained import Chained
from hvd_compress.schedules import Start, as_start
from hvd_compress.transforms import error_feedback


@dataclasses.dataclass(frozen=True)
class OneBit(Chained, name="onebit"):
    """Send one bit an element and two means a column, and keep what that leaves out.

    With ``via="alltoall"``, as in the paper, each rank adds up one shard of every tensor and
    quantises the sum once more, with a residual of its own: a rank sends 1 + 1/N bits an element
    and receives two, however many ranks there are.  With "allgather" every rank receives one bit an
    element from each other, and nothing is quantised twice.

    State: ``residual``, and ``owner_residual`` with "alltoall".

    Options:
        column: elements that share two means, a run of the flat tensor; ``None`` takes a row of a
            PyTorch matrix; see ``codecs/column_means.py``.
        via: see above.
        start: so many steps send everything, since the first gradients of a training suffer most;
            the paper begins on a fraction of the data.

    Reference: Seide, Fu, Droppo, Li, Yu, Interspeech 2014.  Differs from it in: the optimizer's
    momentum acts on the average, as there, but AdaGrad is left to the optimizer too.  Double
    buffering takes two reducers: see docs/mpi-training.md.

    >>> world = World(OneBit(), size=1)
    >>> world.exchange([np.array([3.0, 1.0, -2.0, -4.0])])[0].mean
    array([ 2.,  2., -3., -3.])
    """

    reference = "Seide et al., Interspeech 2014"

    column: int | None = None
    via: str = "alltoall"
    start: Start = dataclasses.field(default=True, metadata=converted(as_start))

    def __post_init__(self) -> None:
        check_choice("via", self.via, ("alltoall", "allgather"))
        super().__post_init__()

    @functools.cached_property
    def blocks(self) -> Chain:
        aggregate = alltoall if self.via == "alltoall" else allgather
        via = dense_until(self.start, aggregate(column_means(self.column)))
        return chain(error_feedback(), via=via)
