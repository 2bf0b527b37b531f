"""Top-k of whole buckets: two passes over memory, one message and one addition for all tensors.

A chain of momentum correction, error feedback and an allgather of the largest elements treats a
bucket at once, in the loops of :mod:`hvd_compress.kernels`.  Its blocks treat one tensor after the
other, with the same bits; tests hold the two equal.  The message of a bucket is the
sparse frame of all its tensors end to end.

One pass computes the next velocities and residuals, looks for the largest elements, and writes the
new states in place.  The old ones are kept until it is known that the entries of all ranks are
finite (:class:`hvd_compress.fused.in_place.OldStates`).  If they cannot be kept, the states are
written in a second pass then.  The averages take the place of the gradients.

In a device's memory the message is another, written where it is sent from and read where it
arrives (:class:`TopKOnDevice`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Hashable, Sequence
from typing import Any, ClassVar

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, Place, Sparse, Spec
from hvd_compress.codecs import Selector, logarithmic, top_k
from hvd_compress.codecs.frame import coded_size, decode_coded, encode_sent
from hvd_compress.fused.in_place import (
    Arrays,
    InPlaceForm,
    InPlacePlan,
    OldStates,
    is_on_host,
    spare_memory,
)
from hvd_compress.fused.on_device import gathered
from hvd_compress.kernels import Steps, TopKSelection, add_up, loops, loops_of
from hvd_compress.requests import Gather, Request
from hvd_compress.times import begin_phase
from hvd_compress.transforms import momentum_correction
from hvd_compress.wire.frame import (
    SparseFrames,
    decode,
    dense_is_shorter,
    encode_dense,
    encode_sparse,
    sparse_size,
)

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
    form: FusedTopK

    def __init__(
        self, form: FusedTopK, specs: Sequence[Spec], key: Hashable, step: Context
    ) -> None:
        super().__init__(form, specs, key, step)
        self.keys = form.keys
        self._spares = spare_memory()
        self._selection = TopKSelection(self.sizes, self.weights)
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
        self, arrays: Arrays, step: Context, kept: OldStates | None
    ) -> Generator[Request, Any, np.ndarray]:
        xp, like = self.xp, arrays.gradients[0]
        begin_phase("search")
        momenta = self.form.momenta_in_use(arrays.momenta)
        steps = self._steps(arrays, kept)
        indices, values, _ = self._selection.select(steps, momenta, self.form.nesterov)
        if kept is not None:
            kept.holds = True
        begin_phase("encode")
        frame, sent = self._message.encode(indices, values)
        frames = yield gather_of(self._message, frame)
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

    def _kept(self, arrays: Arrays, step: Context) -> OldStates | None:
        """Return the place where old states are kept; ``None`` if new ones are not written at once.

        That needs memory, and that results are written where gradients are, or in a graph's own.
        """
        if step.sparse or (self.memory is None and not step.in_place):
            return None
        views = arrays.views
        return OldStates.of([*views.states.values()], views.out, arrays.columns[1], self._spares)

    def _steps(self, arrays: Arrays, kept: OldStates | None) -> Steps:
        x, _, *states = arrays.columns
        residuals, velocities = (*zip(states, states, strict=True), (None, None))[:2]
        return Steps(x, *residuals, *velocities, *(() if kept is None else kept.columns))

    def _settle(
        self,
        arrays: Arrays,
        indices: np.ndarray,
        remaining: np.ndarray,
        finite: np.ndarray,
        kept: OldStates | None,
    ) -> None:
        """Write the new states, or what is left to write of them."""
        masking = self.form.correction is not None and self.form.correction.masking
        steps = self._steps(arrays, kept)
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


class TopKOnDevice(InPlacePlan):
    """The plan of a bucket in a device's memory.

    The result is the same, to the bit.  The message is another: its size is known beforehand, and
    all its parts can be read at the same time.  Places are those within blocks
    (:class:`hvd_compress.torch.triton.loops.BlockMessage`).  Whether all ranks' values are finite
    is found out on the device, and decides there whether states become the new ones.  So the host
    waits for nothing where the engine reads the device's memory, and else for the message.
    """

    def __init__(self, form: Any, specs: Sequence[Spec], key: Hashable, step: Context) -> None:
        super().__init__(form, specs, key, step)
        self.keys, like = form.keys, specs[0].x
        self._step = loops_of(like).TopKStep(self.sizes, self.weights, form.values, like)

    def results_for(
        self, x: Sequence[Array], dtypes: Sequence[str], step: Context
    ) -> Sequence[Array]:
        if set(dtypes) == {"float32"}:
            return super().results_for(x, dtypes, step)
        return [self.empty(each) for each in x]  # gradients are read after results are known

    def meet(self, arrays: Arrays, step: Context) -> Generator[Request, Any, None]:
        form = self.form
        begin_phase("search")
        momenta = form.momenta_in_use(arrays.momenta)
        message = self._step.encode(arrays.columns, momenta, form.nesterov)
        layout = self._step.layout
        seal, checks = layout.header.seal, [layout.opened] * self.size
        everything = yield from gathered(message, seal, checks, step)
        begin_phase("add_up")
        dtypes = None if set(arrays.dtypes) == {"float32"} else arrays.dtypes
        masking = form.correction is not None and form.correction.masking
        self._step.settle(arrays.columns, everything, self.size, masking, dtypes)


#: the indices, into all tensors end to end, and the values of a rank
Entries = tuple[np.ndarray, np.ndarray]

_MOST_ELEMENTS = 2**32
_FLOAT32 = np.dtype(np.float32)


class Numbers:
    """Messages of a bucket whose values are numbers of a dtype.

    Attributes:
        size: the bytes of a message, ``None`` if they depend on what is in it.
    """

    def __init__(self, dtype: str, indices: str, n: int, counts: Sequence[int]) -> None:
        self._dtype, self._indices, self._n = dtype, indices, n
        self._frames = SparseFrames(sum(counts), n, dtype, indices)
        self.size = None if indices == "packed" else sparse_size(sum(counts), n, dtype)

    def encode(self, indices: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the message, and the values as receivers see them (float32)."""
        if self._dtype == "float16":
            limit = np.finfo(np.float16).max
            values = np.clip(values, -limit, limit)
        values = values.astype(self._dtype, copy=False)
        return self._framed(indices, values), values.astype(np.float32, copy=False)

    def _framed(self, indices: np.ndarray, values: np.ndarray) -> np.ndarray:
        return self._frames.encode(indices, values)

    def decode(self, frame: np.ndarray, sender: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices and values (float32) in a message."""
        indices, values = self._frames.decode(frame, sender)
        return indices, values.astype(np.float32, copy=False)


class Unknown(Numbers):
    """Messages of as many numbers as their sender selects; see :class:`Numbers`."""

    def __init__(self, dtype: str, indices: str, n: int) -> None:
        super().__init__(dtype, indices, n, [])
        self.size = None

    def _framed(self, indices: np.ndarray, values: np.ndarray) -> np.ndarray:
        if not dense_is_shorter(indices.size, self._n, self._dtype, self._indices):
            return encode_sparse(indices, values, self._n, self._indices)
        whole = np.zeros(self._n, self._dtype)
        whole[indices] = values
        return encode_dense(whole)

    def decode(self, frame: np.ndarray, sender: str) -> tuple[np.ndarray, np.ndarray]:
        indices, values = decode(frame, self._n, self._dtype, sender=sender)
        if indices is None:
            indices = np.arange(self._n)
        return indices, values.astype(np.float32, copy=False)


class CodedEntries:
    """Messages whose values are coded; see :class:`Numbers`."""

    def __init__(self, codec: logarithmic, indices: str, n: int, counts: Sequence[int]) -> None:
        self._codec, self._packed, self._n = codec.of_parts(counts), indices == "packed", n
        self._count = sum(counts)
        self._random = np.random.default_rng(0)  # which this codec does not ask
        self.size = None if self._packed else coded_size(self._codec, self._count, _FLOAT32, n)

    def encode(self, indices: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return encode_sent(self._codec, values, self._random, indices, self._n, packed=self._packed)

    def decode(self, frame: np.ndarray, sender: str) -> tuple[np.ndarray, np.ndarray]:
        count, n = self._count, self._n
        indices, values = decode_coded(self._codec, frame, count, _FLOAT32, n, sender=sender)
        assert indices is not None
        return indices, values


def message_of(
    values: str | logarithmic, indices: str, n: int, counts: Sequence[int | None]
) -> Numbers | CodedEntries:
    """Return the form of a message of ``counts`` entries of each tensor; all of them are ``None``
    if only the sender knows."""
    known = [count for count in counts if count is not None]
    if isinstance(values, str) and len(known) < len(counts):
        return Unknown(values, indices, n)
    if isinstance(values, str):
        return Numbers(values, indices, n, known)
    return CodedEntries(values, indices, n, known)


def gather_of(message: Numbers | CodedEntries, frame: np.ndarray | None = None) -> Gather:
    """Return the request for the frame of such a message; without one, for what there is in fresh
    memory."""
    if frame is None:
        frame = np.empty(message.size or 0, np.uint8)
    return Gather(frame, message.size is not None)


def finite_of(sizes: Sequence[int], theirs: Sequence[Entries]) -> np.ndarray:
    """Return of which tensors all ranks' values are finite (bool)."""
    ends, finite = np.cumsum(sizes), np.ones(len(sizes), bool)
    for indices, values in theirs:
        if not (fine := np.isfinite(values)).all():
            finite[np.searchsorted(ends, indices[~fine], side="right")] = False
    return finite


def merged(sizes: Sequence[int], theirs: Sequence[Entries]) -> list[Entries]:
    """Return the average of each tensor, as the elements that any rank has sent."""
    indices, values = zip(*theirs, strict=True)
    places, mean = loops().merge(indices, values, len(theirs))
    bounds = np.cumsum([0, *sizes])
    cuts = np.searchsorted(places, bounds)
    rows = zip(bounds, cuts, cuts[1:], strict=False)
    return [(places[a:b] - start, mean[a:b]) for start, a, b in rows]


def part_of(select: Selector, values: str | logarithmic, context: Context) -> int | None:
    """Return the number of elements that are sent of a tensor of ``context.shape``.  ``None``: all,
    or more than a dense sum moves bytes for."""
    n = math.prod(context.shape)
    k = select.count(n, context) if 0 < n < _MOST_ELEMENTS else None
    if k is None or k == n:
        return None
    if isinstance(values, str) and dense_is_less(n, k, values, context.size):
        return None
    return k


def dense_is_less(n: int, k: int, values: str, size: int) -> bool:
    """Return whether a dense sum of ``n`` elements over ``size`` ranks moves fewer bytes than an
    allgather of ``k`` entries."""
    # A header and an entry more or less do not decide.
    entries = sparse_size(k, n, values) - sparse_size(1, n, values)
    return size * entries > 2 * 4 * n
