"""ScaleCom (Chen et al., NeurIPS 2020)."""

from __future__ import annotations

import dataclasses
import functools

from hvd_compress.chain import Chain, chain
from hvd_compress.meetings import leader_top_k
from hvd_compress.methods.chained import Chained
from hvd_compress.schedules import Density
from hvd_compress.transforms import error_feedback


@dataclasses.dataclass(frozen=True)
class ScaleCom(Chained, name="scalecom"):
    """Send the elements that are largest on one rank, from all ranks; ranks take turns.

    Ranks whose accumulated gradients are alike would choose much the same elements; so one rank
    chooses for all, the values are summed, and traffic does not grow with the number of ranks.

    State: ``residual``.  Sent: k values a tensor, and k packed indices at every N-th step.

    Options:
        density: fraction of elements to send, or a schedule.

    Reference: Chen et al., NeurIPS 2020.  Differs from it in: the largest elements are those of the
    whole tensor, where the paper takes one of each short run of elements; and all of what is left
    out is kept, where the paper's filter keeps a part.

    Rank 0 chooses, then rank 1:

    >>> world = World(ScaleCom(density=0.25), size=2)
    >>> gradients = [np.array([4.0, 3.0, 0.0, 0.0]), np.array([1.0, 0.0, 6.0, 3.0])]
    >>> [world.exchange(gradients)[0].mean.tolist() for step in range(2)]
    [[2.5, 0.0, 0.0, 0.0], [0.0, 0.0, 6.0, 0.0]]
    """

    reference = "Chen et al., NeurIPS 2020"

    density: Density = 0.01

    @functools.cached_property
    def blocks(self) -> Chain:
        return chain(error_feedback(), via=leader_top_k(self.density))
