"""Random-k sparsification with shared randomness (Wangni et al., NeurIPS 2018; Stich et al.)."""

from __future__ import annotations

import dataclasses
import functools

from hvd_compress import operators
from hvd_compress.aggregators import allreduce
from hvd_compress.chain import Chain, chain
from hvd_compress.config import check_choice
from hvd_compress.methods._chained import OneChain
from hvd_compress.schedules import Density
from hvd_compress.transforms import error_feedback


@dataclasses.dataclass(frozen=True)
class RandomK(OneChain, name="randomk"):
    """Send k = ceil(density * n) elements that all ranks draw alike.

    The indices need no wire and the values are summed by an ordinary allreduce, so traffic does
    not grow with the number of ranks.  Picks less telling elements than :class:`TopK`.

    State: ``residual`` with error feedback, which sends the elements unscaled.  Without it they
    are scaled by n/k, so that the average is unbiased, with (n/k - 1) times the squared norm of
    the gradient as its variance, and there is no state.

    Options:
        density: fraction of elements to send, or a schedule.
        error_feedback: see above.
        wire: ``None``, "float16" or "bfloat16".
    """

    reference = "Stich et al., NeurIPS 2018"

    density: Density = 0.01
    error_feedback: bool = True
    wire: str | None = None

    def __post_init__(self) -> None:
        check_choice("error_feedback", self.error_feedback, (True, False))
        super().__post_init__()

    @functools.cached_property
    def _chain(self) -> Chain:
        select = operators.random_k(self.density)
        if self.error_feedback:
            return chain(error_feedback(), via=allreduce(self.wire, select))
        return chain(via=allreduce(self.wire, select, unbiased=True))
