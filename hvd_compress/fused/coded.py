"""Codes of whole buckets: one message and one header for all tensors, and no fresh memory.

A chain of error feedback and codes does for a bucket at once what its blocks do for one tensor
after the other, part by part while the part is in the processor's caches, and gives the same bits;
tests hold the two equal.  Shards are those that each tensor has by itself: the message for a rank
holds that rank's shard of every tensor, end to end, behind a byte a tensor that says whether its
values are finite.

The residual becomes what was not sent when it is known that all ranks' values are finite, from the
gradient and this rank's own codes, which are kept until then.  So states are written in place, and
need no second copy; and a step with a NaN or Inf on any rank leaves them as they were.
"""

from __future__ import annotations

import abc
import dataclasses
import threading
import zlib
from collections.abc import Generator, Hashable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, Outcome, Sparse, State
from hvd_compress.chain import Repeated, Transform, in_range
from hvd_compress.codecs import Codec
from hvd_compress.errors import CompressionError
from hvd_compress.kernels import Column, are_flat, loops_of
from hvd_compress.kernels.codecs import all_finite
from hvd_compress.operators.random_k import own_generator
from hvd_compress.requests import Alltoall, Gather, Joint, Request
from hvd_compress.sharding import shards_of
from hvd_compress.times import phase
from hvd_compress.transforms import error_feedback
from hvd_compress.wire.header import START, Header, Kind, failing, opened, padded

_R, _O = "residual", "owner_residual"
_FLOAT32 = np.dtype(np.float32)
#: of a tensor in a message: its codes mean numbers; there are none, since the sender's values were
#: not finite; they mean what is not finite
_FINE, _NOT_FINITE, _OVERFLOWS = 0, 1, 2
#: messages of all ranks may be as long as the longest where that is so little more
_LITTLE = 1.1
_CAUSES = "the ranks do not run the same version with the same compression options"


_Form = TypeVar("_Form", bound="FusedCodes")


class Tensor(NamedTuple):
    """One tensor of a bucket in one step: the gradient as it was given, flat as ``x``; whether the
    result may be written there; and the context, of which the rank, the seed, the step, the name
    and the scratch count."""

    gradient: Array
    x: Array
    state: State
    in_place: bool
    context: Context


@dataclasses.dataclass(frozen=True, eq=False)
class FusedCodes(abc.ABC):
    """The exchange of all tensors of a bucket; see :class:`hvd_compress.requests.Joint`.

    Attributes:
        before: transforms without a state that come first.
        codec: of all values.
        feeds_back: whether there is error feedback.
        size: the number of ranks.
    """

    sends_all: ClassVar[bool] = True

    before: tuple[Transform, ...]
    codec: Codec
    feeds_back: bool
    size: int

    @classmethod
    def of(
        cls: type[_Form], transforms: Sequence[Transform], codec: Codec, size: int
    ) -> _Form | None:
        """Return the form of ``transforms`` and an exchange of codes, if there is one."""
        before, feeds_back = list(transforms), False
        if before and type(last := before[-1]) is error_feedback and last.units == "gradient":
            feeds_back = True
            del before[-1]
        if codec.varies or any(t.keys or type(t).finish is not Transform.finish for t in before):
            return None
        return cls(tuple(before), codec, feeds_back, size)

    def request(self, gradient: Array, state: State, context: Context) -> Joint | None:
        """See :class:`hvd_compress.chain.Fused`: float32 in host memory is taken."""
        xp = backend_of(gradient)
        n = xp.size(gradient)
        if context.scratch is None or not n or xp.traces or xp.dtype(gradient) != "float32":
            return None
        x = xp.widen(gradient)
        for transform in self.before:
            x, _ = transform.update(x, {}, context)
        if loops_of(x) is None or xp.loops(x) != "hvd_compress.kernels" or context.sparse:
            return None
        context = context._replace(shape=xp.shape(gradient))
        tensor = Tensor(gradient, x, state, context.in_place, context)
        return Joint(self, tensor, weight=n, key=xp.__name__)

    def __call__(self, tensors: list[Tensor]) -> Generator[Request, Any, list[Outcome]]:
        bucket = self._bucket(tensors)
        xp = backend_of(tensors[0].x)
        states = [{key: _flat(x) for key, x in t.state.items()} for t in tensors]
        out = [t.x if t.in_place else xp.zeros(xp.size(t.x), t.x) for t in tensors]
        is_needed = tensors[0].context.needs_sent
        sent = [np.empty(n, np.float32) for n in bucket.sizes] if is_needed else None
        arrays = _Arrays(bucket, [t.x for t in tensors], states, out, sent)
        finite = yield from self._meet(bucket, arrays, tensors[0].context)
        means = []
        for tensor, mean in zip(tensors, out, strict=True):
            in_gradient = xp.address(mean) == xp.address(tensor.gradient)
            means.append(tensor.gradient if in_gradient else xp.restore(mean, tensor.gradient))
        own = stand_ins(bucket.sizes)
        if sent is not None:
            own = [xp.from_numpy(x, t.x) for x, t in zip(sent, tensors, strict=True)]
        return list(map(Outcome, means, own, _settled(states, finite)))

    def again(
        self, tensors: Repeated, key: Hashable, context: Context
    ) -> Generator[Request, Any, tuple[Sequence[Array | Sparse], list[State]]] | None:
        """See :class:`hvd_compress.chain.Fused`."""
        bucket = tensors.scratch.get("bucket")
        if self.before or context.sparse or bucket is None or bucket.form is not self:
            return None
        if bucket.rank != context.rank or not bucket.is_of(tensors):
            return None
        return self._again(bucket, tensors, context)

    def _again(
        self, bucket: _Bucket, tensors: Repeated, context: Context
    ) -> Generator[Request, Any, tuple[Sequence[Array], list[State]]]:
        states = [{key: state[key] for key in bucket.keys} for state in tensors.states]
        arrays = _Arrays(bucket, tensors.gradients, states, tensors.gradients)
        finite = yield from self._meet(bucket, arrays, context)
        return tensors.gradients, _settled(states, finite)

    @abc.abstractmethod
    def _meet(
        self, bucket: Any, arrays: _Arrays, context: Context
    ) -> Generator[Request, Any, Sequence[bool]]:
        """Write means and states, and return of which tensors they are finite."""

    @abc.abstractmethod
    def _made(self, tensors: list[Tensor], sizes: list[int], codecs: list[Codec]) -> _Bucket:
        """Return what is kept of a bucket."""

    def _bucket(self, tensors: list[Tensor]) -> _Bucket:
        """What is kept of a bucket between steps, in the first tensor's scratch."""
        scratch, shapes = tensors[0].context.scratch, [t.context.shape for t in tensors]
        names = [t.context.name for t in tensors]
        assert scratch is not None
        bucket: _Bucket | None = scratch.get("bucket")
        if (
            bucket is None
            or bucket.form is not self  # but that of what a switch began with
            or (bucket.shapes, bucket.names) != (shapes, names)
            or bucket.rank != tensors[0].context.rank
        ):
            sizes = [backend_of(t.x).size(t.x) for t in tensors]
            codecs = [self.codec.for_shape(shape) for shape in shapes]
            bucket = scratch["bucket"] = self._made(tensors, sizes, codecs)
        return bucket


class FusedAlltoall(FusedCodes):
    """Every rank adds up one shard of each tensor, and codes what comes out."""

    def _made(self, tensors: list[Tensor], sizes: list[int], codecs: list[Codec]) -> _Sharded:
        return _Sharded(self, tensors, sizes, codecs)

    def _meet(
        self, bucket: _Sharded, arrays: _Arrays, context: Context
    ) -> Generator[Request, Any, Sequence[bool]]:
        xp = backend_of(arrays.gradients[0])
        with phase("encode"):
            frames = bucket.encode(arrays, context)
        received = yield Alltoall([xp.from_numpy(frame, None) for frame in frames])
        with phase("add_up"):
            frame = bucket.add_up(arrays, [xp.to_numpy(x) for x in received], context)
        replies = yield Gather(xp.from_numpy(frame, None), bucket.has_equal_replies)
        with phase("add_up"):
            return bucket.settle(arrays, [xp.to_numpy(x) for x in replies])


class FusedAllgather(FusedCodes):
    """Every rank gets the codes of all, and adds them up in the order of the ranks."""

    def _made(self, tensors: list[Tensor], sizes: list[int], codecs: list[Codec]) -> _Whole:
        return _Whole(self, tensors, sizes, codecs)

    def _meet(
        self, bucket: _Whole, arrays: _Arrays, context: Context
    ) -> Generator[Request, Any, Sequence[bool]]:
        xp = backend_of(arrays.gradients[0])
        with phase("encode"):
            frame = bucket.encode(arrays, context)
        replies = yield Gather(xp.from_numpy(frame, None), equal_sizes=True)
        with phase("add_up"):
            return bucket.settle(arrays, [xp.to_numpy(x) for x in replies])


class _Views(NamedTuple):
    """The arrays of a bucket as flat ones of NumPy, in the same memory, while nobody else runs."""

    x: list[np.ndarray]
    states: dict[str, list[np.ndarray]]
    out: list[np.ndarray]


class _Arrays:
    """The arrays of a bucket in one step: gradients, states, and where the means are written; and
    arrays for what was sent, if that is asked for."""

    def __init__(
        self,
        bucket: _Bucket,
        gradients: Sequence[Array],
        states: Sequence[Mapping[str, Array]],
        out: Sequence[Array],
        sent: Sequence[np.ndarray] | None = None,
    ) -> None:
        self.gradients, self._out, self.sent, self._sizes = gradients, out, sent, bucket.sizes
        self._states = {key: [state[key] for state in states] for key in bucket.keys}
        self._places = [column.addresses for column in self._columns()]

    def _columns(self) -> list[Column]:
        arrays = [self.gradients, *self._states.values(), self._out]
        return [Column(own, self._sizes) for own in arrays]

    @property
    def states(self) -> dict[str, list[Array]]:
        return self._states

    def views(self) -> _Views:
        """Return views, in every turn of this rank anew: an array is not its memory.

        Raises:
            CompressionError: an array has other memory than when the step began.
        """
        columns = self._columns()
        for column, place in zip(columns, self._places, strict=True):
            if not np.array_equal(column.addresses, place):
                raise CompressionError(
                    "the memory of a tensor was changed while it was being exchanged: change .data "
                    "of gradients and states between optimizer.step() and loss.backward() only"
                )
        x, *states, out = (list(column.on_host().arrays) for column in columns)
        return _Views(x, dict(zip(self._states, states, strict=True)), out)


class _Part(NamedTuple):
    """The codes of a run of elements of a tensor, ``own``, at ``codes`` of a message."""

    tensor: int
    own: slice
    codes: slice


class _Message:
    """The layout of a message: a header, a byte for each tensor, codes.

    In the header::

        offset  field
        3       kind: 6 = coded, of several tensors
        6       the lowest bits of the CRC-32 of the codecs' reprs: options must be the same
        8       the number of values

    Args:
        codecs: of all tensors.
        runs: of each tensor, the elements that are sent.
        size: at least so many bytes.
    """

    def __init__(self, codecs: Sequence[Codec], runs: Sequence[slice], size: int = 0) -> None:
        self.parts: list[_Part] = []
        at = START + len(runs) + -len(runs) % 8
        for i, (codec, run) in enumerate(zip(codecs, runs, strict=True)):
            codes = codec.size(run.stop - run.start, _FLOAT32)
            self.parts.append(_Part(i, run, slice(at, at + codes)))
            at += codes
        self.size = max(padded(at - START), size)
        tag = zlib.crc32(" ".join(map(repr, codecs)).encode()) & 0xFFFF
        count = sum(run.stop - run.start for run in runs)
        self._header = Header(Kind.BUCKET, 0, 0, tag, count % 2**32)
        self._flags = slice(START, START + len(runs))

    def flags(self, frame: np.ndarray) -> np.ndarray:
        """Return the byte of each tensor, a view."""
        return frame[self._flags]

    def seal(self, frame: np.ndarray) -> np.ndarray:
        return self._header.seal(frame)

    def opened(self, frame: np.ndarray, sender: int) -> np.ndarray:
        """Return the bytes of the tensors in a message that arrived.

        Raises:
            PayloadError: it is damaged, or was made with other options than this rank's.
        """
        fail = failing(f"rank {sender}", _CAUSES)
        header = opened(frame, Kind.BUCKET, fail=fail)
        if frame.size != self.size:
            raise fail(f"{frame.size} bytes where {self.size} were expected")
        flags = self.flags(frame)
        if header != self._header or flags.max(initial=0) > _OVERFLOWS:
            raise fail(f"no header of {self._header.number} values of {len(flags)} tensors")
        return flags


class _Bucket(abc.ABC):
    """What is kept of a bucket."""

    keys: tuple[str, ...]

    def __init__(
        self, form: FusedCodes, tensors: list[Tensor], sizes: list[int], codecs: list[Codec]
    ) -> None:
        self.form, self.sizes, self.codecs = form, sizes, codecs
        self.shapes = [t.context.shape for t in tensors]
        self.names = [t.context.name for t in tensors]
        self.rank, self.size = tensors[0].context.rank, form.size
        if form.feeds_back:
            for i, (codec, n) in enumerate(zip(codecs, sizes, strict=True)):
                codec.check_feedback(self.fed_back(i, n))

    def fed_back(self, tensor: int, n: int) -> int:
        """Return the most elements of a tensor that are coded at once."""
        return n

    def is_of(self, tensors: Repeated) -> bool:
        """Return whether these may be the bucket's tensors, in arrays that can be written to."""
        if self.sizes != list(tensors.weights):
            return False
        columns = [[state.get(key) for state in tensors.states] for key in self.keys]
        device = getattr(tensors.gradients[0], "device", None)
        return are_flat([tensors.gradients, *columns], self.sizes, device)

    def random(self, tensor: int, step: Context, turn: int = 0) -> Any:
        """Return the random numbers of a tensor in a step, if its codec takes any."""
        if not self.codecs[tensor].draws:
            return None
        return own_generator(step._replace(name=self.names[tensor]), turn)

    def put(
        self, part: _Part, x: np.ndarray, random: Any, frame: np.ndarray, flags: np.ndarray
    ) -> bool:
        """Write the codes of ``x`` into a message; return whether it is finite."""
        code = frame[part.codes]
        fine = self.codecs[part.tensor].put(x, random, code)
        if not fine:
            code[:] = 0
            flags[part.tensor] = _NOT_FINITE
        return fine

    def take(
        self,
        part: _Part,
        frame: np.ndarray,
        flags: np.ndarray,
        out: np.ndarray,
        sender: int,
        add: bool = False,
    ) -> None:
        """Write what a part of a message holds to ``out``, or add it."""
        if flags[part.tensor] == _NOT_FINITE:
            out.fill(np.nan)
            return
        try:
            self.codecs[part.tensor].decode_to(frame[part.codes], out, add)
        except ValueError as error:
            raise failing(f"rank {sender}", _CAUSES)(str(error)) from None


class _Whole(_Bucket):
    """A bucket whose codes go to all ranks."""

    def __init__(
        self, form: FusedCodes, tensors: list[Tensor], sizes: list[int], codecs: list[Codec]
    ) -> None:
        super().__init__(form, tensors, sizes, codecs)
        self.keys = (_R,) if form.feeds_back else ()
        self._message = _Message(codecs, [slice(0, n) for n in sizes])
        self._frame = np.zeros(self._message.size, np.uint8)
        self._longest = max(sizes)

    def encode(self, arrays: _Arrays, step: Context) -> np.ndarray:
        views, frame = arrays.views(), self._frame
        flags = self._message.flags(frame)
        flags[:] = _FINE
        with np.errstate(over="ignore", invalid="ignore"):
            for i, part in enumerate(self._message.parts):
                x = views.x[i]
                if self.form.feeds_back:
                    room = _room(self._longest)[0, : x.size]
                    x = np.add(x, views.states[_R][i], out=room)
                self.put(part, x, self.random(i, step), frame, flags)
        return self._message.seal(frame)

    def settle(self, arrays: _Arrays, frames: Sequence[np.ndarray]) -> list[bool]:
        flags = [self._message.opened(frame, rank) for rank, frame in enumerate(frames)]
        own = self._message.flags(self._frame)
        views, finite = arrays.views(), []
        with np.errstate(over="ignore", invalid="ignore"):
            for i, part in enumerate(self._message.parts):
                total, sent = _room(self._longest)[:, : self.sizes[i]]
                total.fill(0)
                for rank, frame in enumerate(frames):
                    self.take(part, frame, flags[rank], total, rank, add=True)
                finite.append(all_finite(total))
                if (self.form.feeds_back and finite[i]) or arrays.sent is not None:
                    sent = sent if arrays.sent is None else arrays.sent[i]
                    self.take(part, self._frame, own, sent, self.rank)
                    if self.form.feeds_back and finite[i]:
                        residual = views.states[_R][i]
                        np.add(views.x[i], residual, out=residual)
                        residual -= sent
                np.divide(total, np.float32(self.size), out=views.out[i])
        return finite


class _Sharded(_Bucket):
    """A bucket of whose tensors every rank adds up a shard."""

    def __init__(
        self, form: FusedCodes, tensors: list[Tensor], sizes: list[int], codecs: list[Codec]
    ) -> None:
        self.keys = (_R, _O) if form.feeds_back else (_O,)
        self._shards = [
            shards_of(n, form.size, codec.unit(n)) for n, codec in zip(sizes, codecs, strict=True)
        ]
        super().__init__(form, tensors, sizes, codecs)
        columns = list(zip(*self._shards, strict=True))
        self._messages = [_Message(codecs, column) for column in columns]
        largest = max(message.size for message in self._messages)
        self.has_equal_replies = largest * self.size <= _LITTLE * sum(
            message.size for message in self._messages
        )
        self._replies = self._messages
        if self.has_equal_replies:
            self._replies = [_Message(codecs, column, largest) for column in columns]
        self._frames = [np.zeros(message.size, np.uint8) for message in self._messages]
        self._reply = np.zeros(self._replies[self.rank].size, np.uint8)
        longest = max(self._length(i, r) for i in range(len(sizes)) for r in range(self.size))
        self._longest = longest
        #: of the rank's own shards: their sums, and then what their codes leave out
        self._left = [np.empty(self._length(i, self.rank), np.float32) for i in range(len(sizes))]
        #: what owned others' shards when it was last looked through, and how often it was written
        self._looked: list[tuple[Array, Any]] = []
        #: what is in residuals of shards that were this rank's, by tensor
        self._foreign: dict[int, np.ndarray] = {}

    def _length(self, tensor: int, rank: int) -> int:
        own = self._shards[tensor][rank]
        return own.stop - own.start

    def fed_back(self, tensor: int, n: int) -> int:
        return max(self._length(tensor, rank) for rank in range(self.form.size))

    def encode(self, arrays: _Arrays, step: Context) -> list[np.ndarray]:
        """Return a message for each rank."""
        views = arrays.views()
        self._look(arrays.states[_O], views.states[_O])
        pairs = zip(self._messages, self._frames, strict=True)
        flags = [message.flags(frame) for message, frame in pairs]
        for own in flags:
            own[:] = _FINE
        with np.errstate(over="ignore", invalid="ignore"):
            for i in range(len(self.sizes)):
                random, fine = self.random(i, step), True
                for rank, message in enumerate(self._messages):
                    part = message.parts[i]
                    x = self._passed_on(views, part)
                    fine &= self.put(part, x, random, self._frames[rank], flags[rank])
                if not fine:  # nobody shall take the rest of it for the whole
                    for own in flags:
                        own[i] = _NOT_FINITE
        for message, frame in zip(self._messages, self._frames, strict=True):
            message.seal(frame)
        return self._frames

    def _look(self, arrays: Sequence[Array], views: Sequence[np.ndarray]) -> None:
        """Find what is in shards of others, where somebody else has written since the last step:
        after the number of ranks has changed, say."""
        now = [(x, getattr(x, "_version", None)) for x in arrays]
        known = self._looked
        if len(known) == len(now) and all(
            a is b and before == after for (a, before), (b, after) in zip(known, now, strict=True)
        ):
            return
        self._looked, self._foreign = now, {}
        for i, view in enumerate(views):
            own = self._shards[i][self.rank]
            if view[: own.start].any() or view[own.stop :].any():
                foreign = view.copy()
                foreign[own] = 0
                self._foreign[i] = foreign

    def _passed_on(self, views: _Views, part: _Part) -> np.ndarray:
        """Return what is coded of a shard, ``x`` in the blocks' words."""
        own, x = part.own, views.x[part.tensor][part.own]
        if self.form.feeds_back:
            room = _room(self._longest)[0, : x.size]
            x = np.add(x, views.states[_R][part.tensor][own], out=room)
        if (foreign := self._foreign.get(part.tensor)) is not None:
            x = x + foreign[own]
        return x

    def add_up(self, arrays: _Arrays, frames: Sequence[np.ndarray], step: Context) -> np.ndarray:
        """Return the message of the sums of the rank's own shards."""
        message, reply = self._messages[self.rank], self._replies[self.rank]
        theirs = [message.opened(frame, rank) for rank, frame in enumerate(frames)]
        owned, flags = arrays.views().states[_O], reply.flags(self._reply)
        flags[:] = _FINE
        with np.errstate(over="ignore", invalid="ignore"):
            for i, (part, own) in enumerate(zip(message.parts, reply.parts, strict=True)):
                total = self._left[i]
                np.copyto(total, owned[i][part.own])
                for rank, frame in enumerate(frames):
                    self.take(part, frame, theirs[rank], total, rank, add=True)
                if self.put(own, total, self.random(i, step, 1), self._reply, flags):
                    sent = _room(self._longest)[1, : total.size]
                    self.take(own, self._reply, flags, sent, self.rank)
                    if not all_finite(sent):
                        flags[i] = _OVERFLOWS
                    total -= sent
        return reply.seal(self._reply)

    def settle(self, arrays: _Arrays, frames: Sequence[np.ndarray]) -> list[bool]:
        """Write means and new states."""
        flags = [
            reply.opened(frame, rank)
            for rank, (reply, frame) in enumerate(zip(self._replies, frames, strict=True))
        ]
        finite = [bool(fine) for fine in ~np.any(flags, axis=0)]
        views = arrays.views()
        with np.errstate(over="ignore", invalid="ignore"):
            for i, fine in enumerate(finite):
                for rank in range(self.size):
                    self._settle_shard(arrays, views, i, rank, fine)
                    part, own = self._replies[rank].parts[i], self._shards[i][rank]
                    out = views.out[i][own]
                    self.take(part, frames[rank], flags[rank], out, rank)
                    out /= self.size
                if fine:
                    owned = views.states[_O][i]
                    if self._foreign.pop(i, None) is not None:
                        owned.fill(0)
                    owned[self._shards[i][self.rank]] = self._left[i]
        return finite

    def _settle_shard(
        self, arrays: _Arrays, views: _Views, tensor: int, rank: int, fine: bool
    ) -> None:
        """Write what was not sent of a shard, and what was, where that is asked for."""
        part = self._messages[rank].parts[tensor]
        if arrays.sent is None and not (fine and self.form.feeds_back):
            return
        sent = _room(self._longest)[1, : self._length(tensor, rank)]
        frame = self._frames[rank]
        self.take(part, frame, self._messages[rank].flags(frame), sent, self.rank)
        if (foreign := self._foreign.get(tensor)) is not None:
            sent -= foreign[part.own]
        if arrays.sent is not None:
            arrays.sent[tensor][part.own] = sent
        if fine and self.form.feeds_back:
            residual = views.states[_R][tensor][part.own]
            np.add(views.x[tensor][part.own], residual, out=residual)
            residual -= sent


def stand_ins(sizes: Sequence[int]) -> list[Array]:
    """Return arrays of these sizes that take no memory, in the place of what was sent."""
    return [np.broadcast_to(np.float32(0), n) for n in sizes]


def _flat(x: Array) -> Array:
    """Return ``x``, or what takes its place if it was given memory with other strides."""
    xp = backend_of(x)
    device = getattr(x, "device", None)
    is_flat = xp.addresses([x], [xp.size(x)], xp.dtype(x), device) is not None
    return x if is_flat else xp.copy(x)


class _Rooms(threading.local):
    """Memory for one tensor's part at a time, whatever the bucket."""

    room = np.empty((2, 0), np.float32)


_rooms = _Rooms()


def _room(n: int) -> np.ndarray:
    """Return two arrays of ``n`` elements or more, which nothing keeps beyond a turn."""
    if _rooms.room.shape[1] < n:
        _rooms.room = np.empty((2, n), np.float32)
    return _rooms.room


def _settled(states: Sequence[State], finite: Sequence[bool]) -> list[State]:
    """Return the states after the step, which were written in place where it was finite."""
    pairs = zip(states, finite, strict=True)
    return [dict(state) if fine else in_range(state) for state, fine in pairs]
