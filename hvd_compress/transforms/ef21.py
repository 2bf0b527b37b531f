"""EF21: send what is new about the gradient (Richtarik, Sokolov, Fatkhullin; NeurIPS 2021)."""

from __future__ import annotations

import dataclasses

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, Sparse, State
from hvd_compress.chain import Transform


@dataclasses.dataclass(frozen=True)
class ef21(Transform, name="ef21"):
    """Each rank keeps an estimate of its own gradient, which all others could keep too::

        send C(gradient - estimate);   estimate = estimate + sent
        mean_estimate = mean_estimate + mean of what all ranks sent

    and the optimizer steps along ``mean_estimate``.  It must be the last transform, since it passes
    on differences; ``dense_until(1, ...)`` around the aggregator begins with the gradient itself.

    State: ``estimate``, and ``mean_estimate``, equal on all ranks; both start from zero.

    The estimate forgets, where a residual adds up whatever was left out: as gradients settle, it
    becomes exact.  Noise is sent as it comes: put ``smoothing(0.9)`` before it.  Messages must
    be contractions, class B3; :mod:`hvd_compress.studies.step_sizes` says which steps it allows.

    >>> world = World(chain(ef21(), via=allgather(top_k(0.5))), size=1)
    >>> [world.exchange([np.array([4.0, 1.0])])[0].direction.tolist() for step in range(2)]
    [[4.0, 0.0], [4.0, 1.0]]
    """

    keys = ("estimate", "mean_estimate")
    shared = ("mean_estimate",)
    last = True
    elementwise = True
    feeds_back = True

    def repaired(self, state: State) -> State:
        # The mean of the estimates must be the mean estimate: exchanges change both alike.
        return {**state, "estimate": backend_of(state["estimate"]).copy(state["mean_estimate"])}

    def update(self, x: Array, state: State, context: Context) -> tuple[Array, State]:
        return x - state["estimate"], state

    def settle(self, sent: Array | Sparse, state: State, context: Context) -> State:
        old = state["estimate"]  # of the state that came in, not to be changed in place
        if isinstance(sent, Sparse):
            xp = backend_of(old)
            return {**state, "estimate": xp.add_at(xp.copy(old), sent.indices, sent.values)}
        return {**state, "estimate": old + sent}

    def finish(self, mean: Array, state: State, context: Context) -> tuple[Array, State]:
        total = state["mean_estimate"] + mean
        # The direction becomes the gradient, which its owner may clip in place.
        return backend_of(total).copy(total), {**state, "mean_estimate": total}
