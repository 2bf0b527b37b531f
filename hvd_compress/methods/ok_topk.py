"""Ok-Topk: a sparse allreduce whose traffic does not grow with the ranks (Li, Hoefler, 2022)."""

from __future__ import annotations

import dataclasses
import functools

from hvd_compress import meetings
from hvd_compress.chain import Chain, chain
from hvd_compress.methods.chained import Chained
from hvd_compress.schedules import Density
from hvd_compress.transforms import error_feedback


@dataclasses.dataclass(frozen=True)
class OkTopk(Chained, name="oktopk"):
    """Send the k = ceil(density * n) largest elements to the owners of their regions, and step
    along about k of the largest sums; whatever is not among these stays in the residual of the rank
    whose it is.

    State: ``residual``; ``global_threshold``, one number.  Sent: k values and k indices to the
    owners, and about k / N of each to all, where :class:`TopK` receives those of N ranks.

    Options:
        density: fraction of elements to send, or a schedule.
        threshold_every: steps from one exact threshold of the sums to the next.
        indices: on the wire, "packed", about log2(n / k) + 1.5 bits each, or "int32".
        values: on the wire, "float32" or "float16"; what rounding takes off stays in residuals.

    Reference: Li, Hoefler, PPoPP 2022.  Differs from it in: ranks choose exactly k elements;
    regions are balanced at every step.

    One of the sums of four elements:

    >>> world = World(OkTopk(density=0.25), size=2)
    >>> world.exchange([np.array([4.0, 3.0, 0.0, 0.0]), np.array([1.0, 0.0, 6.0, 3.0])])[0].mean
    array([0., 0., 3., 0.])
    """

    reference = "Li, Hoefler, PPoPP 2022"

    density: Density = 0.01
    threshold_every: int = 32
    indices: str = "packed"
    values: str = "float32"

    @functools.cached_property
    def blocks(self) -> Chain:
        via = meetings.ok_topk(self.density, self.threshold_every, self.indices, self.values)
        return chain(error_feedback(), via=via)
