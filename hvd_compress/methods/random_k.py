"""Random-k sparsification with randomness that others know (Wangni et al.; Stich et al., 2018)."""

from __future__ import annotations

import dataclasses
import functools

from hvd_compress import operators
from hvd_compress.chain import Chain, chain
from hvd_compress.config import check_choice
from hvd_compress.meetings import allreduce, gather_drawn
from hvd_compress.methods.chained import Chained
from hvd_compress.schedules import Density
from hvd_compress.transforms import error_feedback


@dataclasses.dataclass(frozen=True)
class RandomK(Chained, name="randomk"):
    """Send k = ceil(density * n) elements that are drawn at random, and no indices.

    With ``shared`` all ranks draw alike, and the values are summed by an ordinary allreduce, so
    traffic does not grow with the number of ranks.  Otherwise each rank draws for itself, from a
    seed that the others know: values are gathered, N - 1 times k to a rank, and the errors of
    ranks are independent, so that the variance of their average is an N-th.

    State: ``residual`` with error feedback, which sends the elements unscaled.  Without it they
    are scaled by n/k, so that the average is unbiased, with (n/k - 1) times the squared norm of
    the gradient as its variance, and there is no state.

    Options:
        density: fraction of elements to send, or a schedule.  An element is sent about
            every 1 / density steps, with all that its residual holds: at 0.01, a learning rate must
            be some hundred times smaller than without compression.
        error_feedback: see above.
        wire: ``None``, "float16", or "bfloat16" if ``shared``.
        shared: see above.

    Reference: Wangni et al.; Stich et al., both NeurIPS 2018.

    Half of the elements, twice as large, which are others in each step:

    >>> world = World(RandomK(density=0.5, error_feedback=False), size=2)
    >>> gradients = [np.ones(4), 3 * np.ones(4)]
    >>> [world.exchange(gradients)[0].mean.tolist() for step in range(2)]
    [[0.0, 0.0, 4.0, 4.0], [0.0, 4.0, 4.0, 0.0]]
    """

    reference = "Stich et al., NeurIPS 2018"

    density: Density = 0.25
    error_feedback: bool = True
    wire: str | None = None
    shared: bool = True

    def __post_init__(self) -> None:
        check_choice("shared", self.shared, (True, False))
        check_choice("error_feedback", self.error_feedback, (True, False))
        super().__post_init__()

    @functools.cached_property
    def blocks(self) -> Chain:
        aggregate = allreduce if self.shared else gather_drawn
        select = operators.random_k(self.density)
        via = aggregate(wire=self.wire, select=select, unbiased=not self.error_feedback)
        return chain(error_feedback(), via=via) if self.error_feedback else chain(via=via)
