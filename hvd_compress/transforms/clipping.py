"""Local gradient clipping (Lin et al., ICLR 2018, section 3.3)."""

from __future__ import annotations

import dataclasses
import math

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, State
from hvd_compress.chain import Transform
from hvd_compress.config import checked, choice, numbers


@dataclasses.dataclass(frozen=True)
class clip_by_local_norm(Transform, name="clip_by_local_norm"):
    """Clip a rank's part of the common gradient at an L2 norm of ``max_norm / sqrt(N)``, over all
    its tensors, before anything is accumulated.

    If gradients are averaged, a rank adds g / N, and g itself is clipped at
    ``max_norm * sqrt(N)``; if they are added (``context.sums``), at ``max_norm / sqrt(N)``.
    The tensor's own norm is taken if ``context.gradient_norm`` is unknown.

    Options:
        max_norm: the threshold for the common gradient, more than 0.
        scale: "sqrt_size", as above; "rank" clips g at ``max_norm``.

    Reference: Lin et al., ICLR 2018, section 3.3.

    >>> clip = clip_by_local_norm(max_norm=1.0)
    >>> clip.update(np.array([30.0, 40.0]), {}, Context(size=4))[0]  # to 1.0 * sqrt(4)
    array([1.2, 1.6])
    """

    max_norm: float = checked(numbers("positive", lambda norm: norm > 0))
    scale: str = choice("sqrt_size", "rank")
    needs_gradient_norm = True
    homogeneous = False

    def update(self, x: Array, state: State, context: Context) -> tuple[Array, State]:
        xp = backend_of(x)
        norm = xp.norm(x) if context.gradient_norm is None else context.gradient_norm
        limit = self.max_norm
        if self.scale == "sqrt_size":
            limit /= math.sqrt(context.size)
            if not context.sums:
                limit *= context.size

        def clipped() -> Array:
            return xp.choose(norm > limit, lambda: xp.scale(x, limit / norm), lambda: x)

        # Where one tensor of this rank is not finite, the step is not, of all tensors and ranks.
        clean = norm < math.inf
        return xp.choose(clean, clipped, lambda: xp.full_like(x, math.nan)), state
