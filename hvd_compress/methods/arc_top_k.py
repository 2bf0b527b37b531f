"""ARC-Top-K: the largest rows of the sum, on which all ranks agree without indices (2025)."""

from __future__ import annotations

import dataclasses
import functools

from hvd_compress.aggregators import aligned_rows
from hvd_compress.chain import Chain, chain
from hvd_compress.methods.chained import Chained
from hvd_compress.schedules import Density
from hvd_compress.transforms import error_feedback


@dataclasses.dataclass(frozen=True)
class ARCTopK(Chained, name="arctopk"):
    """Send about the largest rows of the sum over the ranks, in two sums: of a small sketch, from
    which all ranks know alike which rows these are, and of the rows.

    There are no indices, and traffic does not grow with the number of ranks, as with
    :class:`RandomK`; but elements are sent that are large, in rows.

    State: ``residual``.

    Options:
        density: fraction of rows to send, or a schedule.
        row: consecutive elements that are sent together or not at all.
        width: numbers of the sketch for each row: 1 / ``row`` of all elements for each.

    Reference: Chen et al., arXiv 2510.26709.  Differs from it in: rows have a length of their own,
    where those of the paper are a matrix's; signs are in the place of normal numbers; error
    feedback is the ordinary one (with ``chain(ef21(), via=aligned_rows())`` it is the paper's).

    The second of two rows has the larger sum:

    >>> world = World(ARCTopK(density=0.5, row=4, width=1), size=2)
    >>> gradients = [np.array([4.0, 1.0, 0.0, 0.0, 3.0, 0.0, 0.0, 0.0]), np.eye(8)[4] * 3]
    >>> world.exchange(gradients)[0].mean
    array([0., 0., 0., 0., 3., 0., 0., 0.])
    """

    reference = "Chen et al., 2025"

    density: Density = 0.01
    row: int = 256
    width: int = 2

    @functools.cached_property
    def blocks(self) -> Chain:
        return chain(error_feedback(), via=aligned_rows(self.density, self.row, self.width))
