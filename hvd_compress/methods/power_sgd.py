"""PowerSGD (Vogels, Karimireddy, Jaggi; NeurIPS 2019, arXiv 1905.13727)."""

from __future__ import annotations

import dataclasses
import functools

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context
from hvd_compress.chain import Chain, chain
from hvd_compress.config import checked, choice, converted, numbers
from hvd_compress.kernels.low_rank import matrix_shape
from hvd_compress.meetings import allreduce, dense_until, power_sgd
from hvd_compress.methods.chained import Chained
from hvd_compress.schedules import Start, as_start
from hvd_compress.transforms import error_feedback


@dataclasses.dataclass(frozen=True)
class PowerSGD(Chained, name="powersgd"):
    """Send two thin factors of every matrix, in two sums over the ranks::

        compression=hvd.PowerSGD(rank=4, start=1000)

    A tensor is a matrix of its first dimension by all others.  Vectors, and matrices that would
    hardly shrink, are averaged as they are.  Traffic does not grow with the number of ranks.

    State: ``residual`` with error feedback, and ``factor`` Q^T, equal on all ranks.

    Options:
        rank: of the factors, 1 or more: up to 4 for image models, up to 32 for language models.
        error_feedback, warm_start: without one of them much accuracy is lost; for studies.
        min_compression_rate: matrices that would shrink by less are sent whole; 1 or more.
        start: the number of first steps that send everything; ``True``: none.  PyTorch's hook
            advises a tenth of the training.
        alternate: one factor per step, in turn: Q = M^T P in even steps.
        orthogonalise: "gram_schmidt", row by row and each row twice, or "qr".

    Reference: Vogels, Karimireddy, Jaggi, NeurIPS 2019, arXiv 1905.13727.

    >>> gradient = np.outer(np.arange(1.0, 9.0), np.arange(1.0, 7.0))  # 48 numbers, sent as 14
    >>> world = World(PowerSGD(rank=1), size=2)
    >>> np.allclose(world.exchange([gradient, gradient])[0].mean, gradient)
    True
    """

    reference = "Vogels et al., NeurIPS 2019"
    is_steady = True

    rank: int = 1
    error_feedback: bool = choice(True, False)
    warm_start: bool = True
    min_compression_rate: float = checked(numbers("1 or more", lambda rate: rate >= 1), 2.0)
    start: Start = dataclasses.field(default=True, metadata=converted(as_start))
    alternate: bool = False
    orthogonalise: str = "gram_schmidt"

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self._low_rank  # its blocks check the other options

    def compresses(self, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor of that shape is ever sent as two factors."""
        n, m = matrix_shape(shape)
        rank = min(n, m, self.rank)
        sent = (n + m) * rank / (2 if self.alternate else 1)
        return len(shape) > 1 and sent * self.min_compression_rate < n * m

    def chain(self, gradient: Array, context: Context) -> Chain:
        low_rank = self.compresses(backend_of(gradient).shape(gradient))
        return self._low_rank if low_rank else self._whole

    @functools.cached_property
    def _whole(self) -> Chain:
        # One for all tensors, which are sent together if they ask for the same.
        return chain(via=allreduce("gradient"))

    @functools.cached_property
    def _low_rank(self) -> Chain:
        via = dense_until(
            self.start, power_sgd(self.rank, self.warm_start, self.alternate, self.orthogonalise)
        )
        return chain(error_feedback(), via=via) if self.error_feedback else chain(via=via)
