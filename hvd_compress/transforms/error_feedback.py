"""Error feedback: what was not sent now is added to the next gradient."""

from __future__ import annotations

import dataclasses

from hvd_compress.base import Array, Sparse
from hvd_compress.transforms.feedback import Feedback, unsent


@dataclasses.dataclass(frozen=True)
class error_feedback(Feedback, name="error_feedback"):
    """``x = gradient + residual``; after the exchange ``residual = x - sent``, exactly.

    State: ``residual``, as large as the gradient.  Called local gradient accumulation in DGC.
    Reference: Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019.

    Differs from the latter and from Beznosikov et al. (JMLR 2023) in: the residual is in units of
    the gradient, where theirs is in units of the step, e = learning rate * residual.  At a constant
    rate this is the same, but for operators that do not scale with what they get, such as rounding
    to given levels.  When the rate falls from a to b, the residual is applied at b instead of a.
    The units are those of the gradient because an exchange does not know the rate, of which an
    optimizer may have many, or none that means as much (Adam); and because residuals from before
    the change would else be applied as steps of the old size.  For a study that needs steps, hand
    ``learning rate * gradient`` to the exchange and subtract the result: that is theirs exactly,
    whatever the rate does.
    """

    keys = ("residual",)

    def remaining(self, x: Array, sent: Array | Sparse, old: Array) -> Array:
        return unsent(x, sent)
