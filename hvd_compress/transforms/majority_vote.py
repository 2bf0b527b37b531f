"""Signs of the average of signs."""

from __future__ import annotations

import dataclasses

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, State
from hvd_compress.chain import Transform


@dataclasses.dataclass(frozen=True)
class majority_vote(Transform, name="majority_vote"):
    """The optimizer steps along the sign of the average, which is what most ranks say where they
    sent signs; a tie is 0.  The same where gradients are added instead of averaged: a vote has no
    size that could grow with the number of ranks.

    Reference: Bernstein et al., ICML 2018.

    >>> world = World(chain(majority_vote(), via=allreduce()), size=2)
    >>> world.exchange([np.array([1.0, 1.0, -1.0]), np.array([1.0, -1.0, -1.0])])[0].direction
    array([ 1.,  0., -1.])
    """

    per_rank = False
    elementwise = True
    homogeneous = False
    additive = False

    def finish(self, mean: Array, state: State, context: Context) -> tuple[Array, State]:
        xp = backend_of(mean)
        dtype = xp.dtype(mean)
        return xp.cast(mean > 0, dtype) - xp.cast(mean < 0, dtype), state
