"""Top-k of whole buckets: two passes over memory, one message and one addition for all tensors.

A chain of momentum correction, error feedback and an allgather of the largest elements treats a
bucket at once, in the loops of :mod:`hvd_compress.kernels`.  Its blocks treat one tensor after the
other, with the same bits; tests hold the two equal.  The message of a bucket is the
sparse frame of all its tensors end to end.

One pass computes the next velocities and residuals, looks for the largest elements, and writes the
new states in place.  The old ones are kept until it is known that the entries of all ranks are
finite (:mod:`hvd_compress.fused.kept`).  If they cannot be kept, the states are written in a second
pass then.  The averages take the place of the gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Hashable, Sequence
from typing import Any, ClassVar

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, Place, Sparse, Spec, State
from hvd_compress.codecs import logarithmic
from hvd_compress.fused.in_place import Arrays, InPlaceForm, InPlacePlan, is_on_host
from hvd_compress.fused.kept import Kept, spares
from hvd_compress.fused.messages import Entries, finite_of, gather_of, merged, message_of, part_of
from hvd_compress.fused.top_k_on_device import TopKOnDevice
from hvd_compress.kernels import Column, Selection, Steps, add_up, loops_of
from hvd_compress.operators import top_k
from hvd_compress.requests import Request
from hvd_compress.times import begin_phase
from hvd_compress.transforms import momentum_correction

_V, _R = "velocity", "residual"


@dataclasses.dataclass(frozen=True, eq=False)
class FusedTopK(InPlaceForm):
    """A form for whole buckets; see :class:`hvd_compress.fused.in_place.InPlaceForm`.

    Attributes:
        select: says how many elements of a tensor are sent.
        correction: applies momentum; ``None`` without momentum correction.
        nesterov: the flag in use.
        values, indices: of the message.
    """

    sends_all: ClassVar[bool] = False
    makes_sparse: ClassVar[bool] = True
    takes_halves: ClassVar[bool] = True

    select: top_k
    correction: momentum_correction | None
    nesterov: bool
    values: str | logarithmic
    indices: str

    def weight(self, context: Context) -> int | None:
        return part_of(self.select, self.values, context)

    def place(self, gradient: Array, context: Context) -> Place | None:
        place = super().place(gradient, context)
        if place is None or is_on_host(place.x):
            return place
        return None if context.sparse else place._replace(kind="joint work on GPUs")

    def takes(self, x: Array) -> bool:
        return is_on_host(x) or (isinstance(self.values, str) and loops_of(x) is not None)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the states that are used."""
        return (_R,) if self.correction is None else (_R, _V)

    def momenta_in_use(self, momenta: Sequence[float]) -> Sequence[float] | None:
        """Return the momentum of each tensor, given the optimizer's; ``None`` without momentum
        correction."""
        return None if self.correction is None else self.correction.momenta_in_use(momenta)

    def plan(self, specs: Sequence[Spec], key: Hashable, step: Context) -> InPlacePlan:
        plan = TopKPlan if is_on_host(specs[0].x) else TopKOnDevice
        return plan(self, specs, key, step)


class TopKPlan(InPlacePlan):
    """The plan of a bucket; see :mod:`hvd_compress.fused.top_k`."""

    form: FusedTopK
    writes_states = False

    def __init__(
        self, form: FusedTopK, specs: Sequence[Spec], key: Hashable, step: Context
    ) -> None:
        super().__init__(form, specs, key, step)
        self.keys = form.keys
        self._spares = spares()
        self._selection = Selection(self.sizes, self.weights)
        self._message = message_of(form.values, form.indices, sum(self.sizes), self.weights)
        self.requests = [gather_of(self._message)]

    def meet(self, arrays: Arrays, step: Context) -> Generator[Request, Any, np.ndarray]:
        kept = self._kept(arrays, step)
        try:
            return (yield from self._met(arrays, step, kept))
        except BaseException:  # also of who gives the exchange up
            if kept is not None and kept.holds:
                kept.put_back()
            raise
        finally:
            if kept is not None:
                kept.close()

    def _met(
        self, arrays: Arrays, step: Context, kept: Kept | None
    ) -> Generator[Request, Any, np.ndarray]:
        xp, like = self.xp, arrays.gradients[0]
        begin_phase("search")
        momenta = self.form.momenta_in_use(arrays.momenta)
        steps = self._steps(arrays, kept=kept)
        indices, values, _ = self._selection.select(steps, momenta, self.form.nesterov)
        if kept is not None:
            kept.holds = True
        begin_phase("encode")
        frame, sent = self._message.encode(indices, values)
        frames = yield self.requests[0].carrying([frame])
        begin_phase("add_up")
        theirs = [self._message.decode(frame, f"rank {rank}") for rank, frame in enumerate(frames)]
        finite = finite_of(self.sizes, theirs)
        if any(dtype != "float32" for dtype in arrays.dtypes):
            finite &= self._fits(theirs, like, arrays.dtypes)
        begin_phase("search")
        with np.errstate(invalid="ignore"):  # of a non-finite step
            self._settle(arrays, indices, values - sent, finite, kept)
        begin_phase("add_up")
        if step.sparse:
            means = merged(self.sizes, theirs)
            arrays.sparse = [Sparse(*(xp.from_numpy(x, like) for x in own)) for own in means]
        else:
            at, what = zip(*theirs, strict=True)
            add_up(arrays.columns[1], at, what, self.size)
        return finite

    def _kept(self, arrays: Arrays, step: Context) -> Kept | None:
        """Return the place where old states are kept; ``None`` if new ones are not written at once.

        That needs memory, that nobody still looks at the old ones, and that results are written
        where gradients are.
        """
        if self.memory is not None or step.sparse or not step.in_place:
            return None
        views = arrays.views
        return Kept.of([*views.states.values()], views.out, arrays.columns[1], self._spares)

    def _steps(
        self, arrays: Arrays, new: Sequence[State] | None = None, kept: Kept | None = None
    ) -> Steps:
        x, _, *states = arrays.columns
        to = states if new is None else [Column([s[key] for s in new]) for key in self.keys]
        residuals, velocities = (*zip(states, to, strict=True), (None, None))[:2]
        return Steps(x, *residuals, *velocities, *(() if kept is None else kept.columns))

    def _settle(
        self,
        arrays: Arrays,
        indices: np.ndarray,
        remaining: np.ndarray,
        finite: np.ndarray,
        kept: Kept | None,
    ) -> None:
        """Write the new states, in place unless others may still look at the old ones; or what is
        left to write of them."""
        if self.memory is not None:
            arrays.new = [
                {key: self.empty(x) for key, x in state.items()} for state in arrays.by_tensor()
            ]
        masking = self.form.correction is not None and self.form.correction.masking
        steps = self._steps(arrays, arrays.new, kept)
        if kept is not None and not finite.all():
            kept.put_back(np.flatnonzero(~finite).tolist())
        self._selection.settle(steps, indices, remaining, masking, finite)

    def _fits(self, theirs: list[Entries], like: Array, dtypes: Sequence[str]) -> np.ndarray:
        """Return which gradients have room for the averages, which are of residuals, too: in host
        memory, so that nobody waits for a device."""
        xp = backend_of(like)
        with np.errstate(over="ignore"):
            means = zip(merged(self.sizes, theirs), dtypes, strict=True)
            parts = [xp.cast(xp.from_numpy(x, None), dtype) for (_, x), dtype in means]
        return np.array([bool(xp.all_finite(part)) for part in parts])
