"""Ok-Topk: a sparse allreduce of the k largest sums that sends less than 6 k values and indices.

Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022.  Every
rank selects the elements above a local threshold and sends each to the owner of its region; owners
add up and send the sums above a global threshold to all.  Both thresholds, and the boundaries
between the regions, are computed exactly only in some steps, and adapted or kept in the others:

===================  ==========  =======================================================
state                exact each  in between
===================  ==========  =======================================================
local threshold      32 steps    / 1.012 below 2k/3 entries, * 1.012 above 5k/4
global threshold     32 steps    / 1.008 below 2k/3 entries, * 1.008 above 4k/3
boundaries           64 steps    kept
===================  ==========  =======================================================

On steps with exact thresholds owners send all sums, and every rank takes the k largest.

Differs from the paper in: if twice as many entries as wanted exceed a threshold, it is computed
exactly at once (it may have become 0, and traffic must stay bounded); non-finite elements count as
larger than all others, and a step with such elements does not change the thresholds; a selection
contains no zeros; owners do not balance their sums before they send them; all messages of a phase
are in flight at once, not four; entries that a rank has to keep are returned as ``dropped`` instead
of cleared from a residual.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Generator
from typing import Any

import numpy as np

from hvd_compress.aggregators.sparse_vectors import contains, join, largest, pick, take_in
from hvd_compress.backends import backend_of
from hvd_compress.base import Context, Sparse
from hvd_compress.config import check_choice, is_number, is_whole
from hvd_compress.errors import ConfigError
from hvd_compress.integrations.checkpoints import entry, refused, whole
from hvd_compress.mpi.dense.direct_allreduce import direct
from hvd_compress.mpi.sparse.allreduce import Comm, Reduced, reduced, run
from hvd_compress.mpi.sparse.messages import Format
from hvd_compress.mpi.sparse.split_allgather import from_owners, to_owners
from hvd_compress.mpi.transport.communicator import Channel, Communicator
from hvd_compress.mpi.transport.progress import Wait
from hvd_compress.mpi.transport.reduction import Reduction
from hvd_compress.operators import top_k
from hvd_compress.sharding import bounds_of
from hvd_compress.wire.frame import CODECS, DTYPES


@dataclasses.dataclass
class OkTopkState:
    """The state between two steps; ``local_threshold`` differs between ranks.

    Attributes:
        iteration: the number of calls of ``allreduce`` so far.
        local_threshold: this rank sends elements of at least this magnitude; ``None`` before the
            first step.
        global_threshold: sums of at least this magnitude are part of the result.
        boundaries: the first index of each region but the first.
    """

    iteration: int = 0
    local_threshold: float | None = None
    global_threshold: float | None = None
    boundaries: list[int] | None = None


@dataclasses.dataclass(frozen=True)
class OkTopk:
    """The Ok-Topk allreduce of one tensor over many steps::

        ok_topk = mpi.OkTopk(k=1000)
        for each step:
            chosen = ok_topk.select(gradient + residual)
            mean, dropped = ok_topk.allreduce(chosen, gradient.size, op="mean")
            # residual: what was not chosen, and what was dropped

    Options:
        k: entries of the result, about, and of what each rank sends.
        threshold_every, boundaries_every: steps from one exact computation to the next.
        values, indices: on the wire, as for :func:`.sparse_allreduce`.
    """

    k: int
    threshold_every: int = 32
    boundaries_every: int = 64
    values: str | None = None
    indices: str = "int32"
    state: OkTopkState = dataclasses.field(default_factory=OkTopkState, init=False, compare=False)

    def __post_init__(self) -> None:
        for option in ("k", "threshold_every", "boundaries_every"):
            value = getattr(self, option)
            if not is_whole(value) or value < 1:
                raise ConfigError(f"{option} must be an integer, 1 or more; got {value!r}")
        check_choice("values", self.values, (None, *DTYPES))
        check_choice("indices", self.indices, CODECS)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state, which can be written as JSON."""
        return dataclasses.asdict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state.  All ranks must load the same state, except for the local threshold;
        if the number of ranks has changed, new boundaries are computed.

        Raises:
            ConfigError: something is missing or damaged; then nothing has changed.
        """
        known = {field.name for field in dataclasses.fields(OkTopkState)}
        if not isinstance(state, dict) or set(state) != known:
            found = [*map(str, state)] if isinstance(state, dict) else state
            raise refused(f"it must have {sorted(known)}; got {found!r}")
        whole(state, "iteration")
        for key in ("local_threshold", "global_threshold"):
            if (value := state[key]) is not None and not (
                is_number(value) and 0 <= value < math.inf
            ):
                raise refused(f"{key!r} is {value!r} where a number from 0 was expected")
        bounds = entry(state, "boundaries", (list, type(None))) or []
        if not all(is_whole(b) and b >= 0 for b in bounds) or bounds != sorted(bounds):
            raise refused(f"'boundaries' are {bounds!r} where ascending places were expected")
        loaded = OkTopkState(**state)
        self.state.__dict__.update(dataclasses.asdict(loaded))

    # -- choosing ----------------------------------------------------------------------------

    def select(self, x: Any) -> Sparse:
        """Return the entries of ``x`` (any shape) that this rank sends: about k, at most 2 k."""
        xp = backend_of(x)
        xp.check_gradient(x)
        magnitude = xp.abs(xp.widen(x))
        n = xp.size(magnitude)
        k, threshold = min(self.k, n), self.state.local_threshold
        if threshold is not None and self.state.iteration % self.threshold_every:
            chosen = _passing(xp, magnitude, threshold)
            if xp.size(chosen) <= 2 * k:
                if xp.all_finite(xp.take(magnitude, chosen)):
                    count = xp.size(chosen)
                    threshold = _drift(threshold, count, 2 * k / 3, 5 * k / 4, 1.012)
                    self.state.local_threshold = threshold
                return Sparse(chosen, xp.take(x.reshape(-1), chosen))
        chosen = self._select_exactly(xp, magnitude, k)
        return Sparse(chosen, xp.take(x.reshape(-1), chosen))

    def _select_exactly(self, xp: Any, magnitude: Any, k: int) -> Any:
        if not k:
            return xp.nonzero(magnitude > 0)
        is_finite = xp.all_finite(magnitude)
        if not is_finite:  # as large as can be
            bad = xp.nonzero(~(magnitude < float("inf")))
            magnitude = xp.put(xp.copy(magnitude), bad, float("inf"))
        chosen = top_k().select(magnitude, k, Context(step=self.state.iteration))
        chosen_magnitude = xp.take(magnitude, chosen)
        if is_finite:
            self.state.local_threshold = float(chosen_magnitude.min())
        else:
            self.state.local_threshold = None
        return xp.take(chosen, xp.nonzero(chosen_magnitude > 0))

    # -- adding ------------------------------------------------------------------------------

    def allreduce(self, sparse: Sparse, n: int, *, comm: Comm = None, op: str = "sum") -> Reduced:
        """Return about the k largest sums over the ranks; all ranks get the same bits.

        ``dropped`` holds this rank's entries that are not part of the result, and the rounding
        errors where ``values`` is narrower than the tensor's dtype.

        Args:
            sparse: what :meth:`select` returned, or any other choice.
            n: elements of the flat tensor, the same in all steps.
            comm: ``None`` for all ranks.
            op: "sum" or "mean".

        Raises:
            ConfigError, UnsupportedError: an option or an array that does not fit.
            MismatchError: ranks differ in n, dtype, options or state.
            PayloadError: a message was damaged on its way.
        """
        communicator, state = Communicator.of(comm), self.state
        mine, like = take_in(sparse, n)
        size, dtype = communicator.size, mine.values.dtype.name
        form = Format.of(n, dtype, self.values, self.indices, op, size)
        brought, rounded_off = form.bring(mine)

        boundaries = state.boundaries
        if state.iteration % self.boundaries_every == 0 or not _fit(boundaries, form):
            boundaries = None
        threshold = state.global_threshold
        if state.iteration % self.threshold_every == 0:
            threshold = None
        digest = zlib.crc32(repr((boundaries, threshold)).encode())
        total, lost, bounds = run(
            communicator,
            f"ok_topk({form}, k={self.k}, iteration {state.iteration}, state {digest:08x})",
            lambda: self._exchange(communicator.channel(), brought, form, boundaries, threshold),
        )
        state.iteration += 1
        state.boundaries = bounds[1:-1]
        self._learn(np.abs(total.values), min(self.k, form.n), threshold)

        is_kept = contains(total, mine.indices)
        rounded_off = pick(rounded_off, contains(total, rounded_off.indices))
        lost = pick(lost, contains(total, lost.indices))
        left_out = pick(mine, ~is_kept)
        return reduced(form, total, [left_out, rounded_off, lost], like)

    def _exchange(
        self,
        channel: Channel,
        mine: Sparse,
        form: Format,
        boundaries: list[int] | None,
        threshold: float | None,
    ) -> Generator[Wait, None, tuple[Sparse, Sparse, list[int]]]:
        """The result, what rounding took off this rank's region, and the bounds of regions."""
        if boundaries is None:
            boundaries = yield from _balanced(channel, mine, form.n)
        bounds = [0, *boundaries, form.n]
        parts = yield from to_owners(channel, mine, bounds, form)
        start, stop = bounds[channel.rank : channel.rank + 2]
        done: Any
        done, lost = form.settle(form.add_up(parts, stop - start, form.wire))
        if threshold is not None:  # of what arrives, which is what the threshold was learnt from
            done = pick(done, ~(np.abs(done.values.astype(form.wide)) < threshold))
        regions: list[Any] = yield from from_owners(channel, done, bounds, form)
        total = join(regions, bounds)
        if threshold is None:
            total = pick(total, largest(total.values, self.k))
        return total, Sparse(lost.indices + start, lost.values), bounds

    def _learn(self, magnitude: np.ndarray, k: int, threshold: float | None) -> None:
        """Adapt the global threshold to a result; all ranks do it alike."""
        count = magnitude.size
        if not np.isfinite(magnitude).all():
            learnt = threshold
        elif threshold is not None and count <= 2 * k:
            learnt = _drift(threshold, count, 2 * k / 3, 4 * k / 3, 1.008)
        elif count < k or not k:
            learnt = 0.0
        else:
            learnt = float(np.partition(magnitude, count - k)[count - k])
        self.state.global_threshold = learnt


def _passing(xp: Any, magnitude: Any, threshold: float) -> Any:
    # NaN is not less than anything.
    return xp.nonzero(~(magnitude < threshold) if threshold > 0 else magnitude != 0)


def _drift(threshold: float, count: int, low: float, high: float, factor: float) -> float:
    if count < low:
        return threshold / factor
    return threshold * factor if count > high else threshold


def _fit(boundaries: list[int] | None, form: Format) -> bool:
    if boundaries is None or len(boundaries) != form.size - 1:
        return False
    return not boundaries or boundaries[-1] <= form.n


def _balanced(channel: Channel, mine: Sparse, n: int) -> Generator[Wait, None, list[int]]:
    """Boundaries with as many of a rank's entries between them, averaged over the ranks."""
    count, size = mine.indices.size, channel.size
    if count:
        local = mine.indices[bounds_of(count, size)[1:-1]]
    else:
        local = np.array(bounds_of(n, size)[1:-1], np.int64)
    total = np.empty_like(local)
    if size > 1:
        yield from direct(channel, local, total, Reduction("sum", "int64", size))
    return (total // size).tolist()
