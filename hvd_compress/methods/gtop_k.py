"""Global top-k sparsification (Shi, Wang, Zhao, Tang, Wang, Tang, Chu; ICDCS 2019)."""

from __future__ import annotations

import dataclasses
import functools

from hvd_compress import aggregators
from hvd_compress.chain import Chain, chain
from hvd_compress.methods.chained import Chained
from hvd_compress.schedules import Density
from hvd_compress.transforms import error_feedback


@dataclasses.dataclass(frozen=True)
class GTopK(Chained, name="gtopk"):
    """Send the k = ceil(density * n) largest elements, merge them in pairs of ranks, and step along
    the k largest sums; an element that is not in these stays in the residual of its rank.

    State: ``residual``.  Sent: k values and k indices in each of log2 N rounds (two more if N
    is no power of two), where :class:`TopK` receives those of N ranks.

    Options:
        density: fraction of elements to send, or a schedule.
        selection: "sampled" or "exact"; the same elements, found in two ways.
        indices: on the wire, "packed", about log2(n / k) + 1.5 bits each, or "int32".  Ranks then
            exchange the sizes of messages, which over MPI takes as many rounds again.

    Reference: Shi, Wang, Zhao, Tang, Wang, Tang, Chu, ICDCS 2019.  Differs from it in: an element
    that was dropped in a merge is never lost; pairs exchange instead of a tree with a broadcast;
    any number of ranks.

    The 4 was dropped in the merge, since the 6 is larger; it stays on rank 0:

    >>> world = World(GTopK(density=0.25), size=2)
    >>> world.exchange([np.array([4.0, 3.0, 0.0, 0.0]), np.array([1.0, 0.0, 6.0, 3.0])])[0].mean
    array([0., 0., 3., 0.])
    >>> [state["residual"] for state in world.states["tensor"]]
    [array([4., 3., 0., 0.]), array([1., 0., 0., 3.])]
    """

    reference = "Shi et al., ICDCS 2019"

    density: Density = 0.005
    selection: str = "sampled"
    indices: str = "packed"

    @functools.cached_property
    def blocks(self) -> Chain:
        via = aggregators.gtop_k(self.density, self.selection, self.indices)
        return chain(error_feedback(), via=via)
