"""Codes of whole buckets: one message and one header for all tensors, and no fresh memory.

A chain of elementwise transforms and codes, such as error feedback, does for a bucket at once what
its blocks do for one tensor after the other, and gives the same bits; tests hold the two equal.
Shards are those that each tensor has by itself: the message for a rank holds that rank's shard of
every tensor, end to end, behind a byte a tensor that says whether its values are finite.

What is kept of a step, until all ranks' values are known to be finite, is the gradient and this
rank's own codes.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
import zlib
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context
from hvd_compress.chain import Transform
from hvd_compress.codecs import Codec
from hvd_compress.fused.bucket import Arrays, Bucket, Tensor, Views, room
from hvd_compress.fused.stages import Sent, Staged, StagedBucket
from hvd_compress.kernels.codecs import all_finite
from hvd_compress.operators.random_k import own_generator
from hvd_compress.requests import Alltoall, Gather, Request
from hvd_compress.sharding import shards_of
from hvd_compress.times import phase
from hvd_compress.wire.header import START, Header, Kind, failing, opened, padded

_O = "owner_residual"
_FLOAT32 = np.dtype(np.float32)
#: of a tensor in a message: its codes mean numbers; there are none, since the sender's values were
#: not finite; they mean what is not finite
_FINE, _NOT_FINITE, _OVERFLOWS = 0, 1, 2
#: messages of all ranks may be as long as the longest where that is so little more
_LITTLE = 1.1
_CAUSES = "the ranks do not run the same version with the same compression options"


_Form = TypeVar("_Form", bound="FusedCodes")


@dataclasses.dataclass(frozen=True, eq=False)
class FusedCodes(Staged):
    """The exchange of all tensors of a bucket; see :class:`hvd_compress.fused.bucket.InPlace`.

    Attributes:
        codec: of all values.
    """

    codec: Codec

    @classmethod
    def of(
        cls: type[_Form], transforms: Sequence[Transform], context: Context, *exchange: Any
    ) -> _Form | None:
        form = super().of(transforms, context, *exchange)
        return None if form is None or form.codec.varies else form

    def weight(self, context: Context) -> int:
        return math.prod(context.shape)


class FusedAlltoall(FusedCodes):
    """Every rank adds up one shard of each tensor, and codes what comes out."""

    def made(self, tensors: list[Tensor]) -> Bucket:
        return _Sharded(self, tensors)


class FusedAllgather(FusedCodes):
    """Every rank gets the codes of all, and adds them up in the order of the ranks."""

    def made(self, tensors: list[Tensor]) -> Bucket:
        return _Whole(self, tensors)


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


class _Bucket(StagedBucket, abc.ABC):
    """What both kinds of exchanges keep of a bucket."""

    form: FusedCodes

    def __init__(self, form: FusedCodes, tensors: list[Tensor]) -> None:
        super().__init__(form, tensors)
        self.codecs = [form.codec.for_shape(shape) for shape in self.shapes]

    def _check_feedback(self, most: Sequence[int]) -> None:
        """Raise ``ConfigError`` unless error feedback converges where so many elements of each
        tensor are coded at once."""
        for codec, n in zip(self.codecs, most, strict=True):
            codec.check_feedback(n)

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

    def is_only_taken_off(self, arrays: Arrays) -> bool:
        """Whether what was sent is taken off residuals, and nobody looks at it."""
        return arrays.sent is None and self.form.stages.only_feeds_back

    def off(self, part: _Part, frame: np.ndarray) -> Sent:
        """Return what takes off the values of a part of a message of this rank."""
        return functools.partial(self.codecs[part.tensor].take_off, frame[part.codes])


class _Whole(_Bucket):
    """A bucket whose codes go to all ranks."""

    def __init__(self, form: FusedCodes, tensors: list[Tensor]) -> None:
        super().__init__(form, tensors)
        if form.stages.feeds_back:
            self._check_feedback(self.sizes)
        self._message = _Message(self.codecs, [slice(0, n) for n in self.sizes])
        self._frame = np.zeros(self._message.size, np.uint8)
        self._longest = max(self.sizes)

    def meet(self, arrays: Arrays, step: Context) -> Generator[Request, Any, Sequence[bool]]:
        xp = backend_of(arrays.gradients[0])
        with phase("encode"):
            frame = self._encode(arrays, step)
        replies = yield Gather(xp.from_numpy(frame, None), equal_sizes=True)
        with phase("add_up"):
            return self._finish(arrays, [xp.to_numpy(x) for x in replies], step)

    def _encode(self, arrays: Arrays, step: Context) -> np.ndarray:
        views, frame = arrays.views(), self._frame
        flags = self._message.flags(frame)
        flags[:] = _FINE
        with np.errstate(over="ignore", invalid="ignore"):
            for i, part in enumerate(self._message.parts):
                its = arrays.context(step, i)
                x = self.passed_on(views, i, part.own, its, self._longest)
                self.put(part, x, self.random(i, step), frame, flags)
        return self._message.seal(frame)

    def _finish(
        self, arrays: Arrays, frames: Sequence[np.ndarray], step: Context
    ) -> Sequence[bool]:
        flags = [self._message.opened(frame, rank) for rank, frame in enumerate(frames)]
        own = self._message.flags(self._frame)
        views, finite = arrays.views(), []
        with np.errstate(over="ignore", invalid="ignore"):
            for i, part in enumerate(self._message.parts):
                total, sent = room(self._longest)[:, : self.sizes[i]]
                total.fill(0)
                for rank, frame in enumerate(frames):
                    self.take(part, frame, flags[rank], total, rank, add=True)
                finite.append(all_finite(total))
                if arrays.sent is not None:
                    sent = arrays.sent[i]
                off: Sent | None = None
                if finite[i] and self.is_only_taken_off(arrays):
                    off = self.off(part, self._frame)
                elif finite[i] or arrays.sent is not None:
                    self.take(part, self._frame, own, sent, self.rank)
                    off = sent if finite[i] else None

                def mean(out: np.ndarray, total: np.ndarray = total) -> None:
                    np.divide(total, np.float32(self.size), out=out)

                its = arrays.context(step, i)
                self.settle(views, i, part.own, its, off, mean)
        return finite


class _Sharded(_Bucket):
    """A bucket of whose tensors every rank adds up a shard."""

    def __init__(self, form: FusedCodes, tensors: list[Tensor]) -> None:
        super().__init__(form, tensors)
        self.keys = (*self.keys, _O)
        self._shards = [
            shards_of(n, self.size, codec.unit(n))
            for n, codec in zip(self.sizes, self.codecs, strict=True)
        ]
        # Owners feed back what they leave out, whether a transform does or not.
        self._check_feedback([max(s.stop - s.start for s in own) for own in self._shards])
        columns = list(zip(*self._shards, strict=True))
        self._messages = [_Message(self.codecs, column) for column in columns]
        largest = max(message.size for message in self._messages)
        self._has_equal_replies = largest * self.size <= _LITTLE * sum(
            message.size for message in self._messages
        )
        self._replies = self._messages
        if self._has_equal_replies:
            self._replies = [_Message(self.codecs, column, largest) for column in columns]
        self._frames = [np.zeros(message.size, np.uint8) for message in self._messages]
        self._reply = np.zeros(self._replies[self.rank].size, np.uint8)
        longest = max(self._length(i, r) for i in range(len(self.sizes)) for r in range(self.size))
        self._longest = longest
        #: of the rank's own shards: their sums, and then what their codes leave out
        lengths = [self._length(i, self.rank) for i in range(len(self.sizes))]
        self._left = [np.empty(n, np.float32) for n in lengths]
        #: what owned others' shards when it was last looked through, and how often it was written
        self._looked: list[tuple[Array, Any]] = []
        #: what is in residuals of shards that were this rank's, by tensor
        self._foreign: dict[int, np.ndarray] = {}

    def _length(self, tensor: int, rank: int) -> int:
        own = self._shards[tensor][rank]
        return own.stop - own.start

    def meet(self, arrays: Arrays, step: Context) -> Generator[Request, Any, Sequence[bool]]:
        xp = backend_of(arrays.gradients[0])
        with phase("encode"):
            frames = self._encode(arrays, step)
        received = yield Alltoall([xp.from_numpy(frame, None) for frame in frames])
        with phase("add_up"):
            frame = self._add_up(arrays, [xp.to_numpy(x) for x in received], step)
        replies = yield Gather(xp.from_numpy(frame, None), self._has_equal_replies)
        with phase("add_up"):
            return self._finish(arrays, [xp.to_numpy(x) for x in replies], step)

    def _encode(self, arrays: Arrays, step: Context) -> list[np.ndarray]:
        """Return a message for each rank."""
        views = arrays.views()
        self._look(arrays.states[_O], views.states[_O])
        pairs = zip(self._messages, self._frames, strict=True)
        flags = [message.flags(frame) for message, frame in pairs]
        for own in flags:
            own[:] = _FINE
        with np.errstate(over="ignore", invalid="ignore"):
            for i in range(len(self.sizes)):
                random, its, fine = self.random(i, step), arrays.context(step, i), True
                for rank, message in enumerate(self._messages):
                    part = message.parts[i]
                    x = self._of_shard(views, part, its)
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

    def _of_shard(self, views: Views, part: _Part, step: Context) -> np.ndarray:
        """Return what is coded of a shard, ``x`` in the blocks' words."""
        x = self.passed_on(views, part.tensor, part.own, step, self._longest)
        if (foreign := self._foreign.get(part.tensor)) is not None:
            x = x + foreign[part.own]
        return x

    def _add_up(self, arrays: Arrays, frames: Sequence[np.ndarray], step: Context) -> np.ndarray:
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
                    self.codecs[i].take_off(self._reply[own.codes], total)
                    if not all_finite(total):
                        flags[i] = _OVERFLOWS
        return reply.seal(self._reply)

    def _finish(
        self, arrays: Arrays, frames: Sequence[np.ndarray], step: Context
    ) -> Sequence[bool]:
        flags = [
            reply.opened(frame, rank)
            for rank, (reply, frame) in enumerate(zip(self._replies, frames, strict=True))
        ]
        finite = [bool(fine) for fine in ~np.any(flags, axis=0)]
        views = arrays.views()
        with np.errstate(over="ignore", invalid="ignore"):
            for i, fine in enumerate(finite):
                its = arrays.context(step, i)
                for rank, own in enumerate(self._shards[i]):
                    part = self._replies[rank].parts[i]

                    def mean(out: np.ndarray, part: _Part = part, rank: int = rank) -> None:
                        self.take(part, frames[rank], flags[rank], out, rank)
                        out /= self.size

                    sent = self._sent(arrays, i, rank, fine)
                    self.settle(views, i, own, its, sent if fine else None, mean)
                if fine:
                    owned = views.states[_O][i]
                    if self._foreign.pop(i, None) is not None:
                        owned.fill(0)
                    owned[self._shards[i][self.rank]] = self._left[i]
        return finite

    def _sent(self, arrays: Arrays, tensor: int, rank: int, fine: bool) -> Sent | None:
        """Return what was sent of a shard, if somebody asks."""
        part = self._messages[rank].parts[tensor]
        if fine and tensor not in self._foreign and self.is_only_taken_off(arrays):
            return self.off(part, self._frames[rank])
        sent = room(self._longest)[1, : self._length(tensor, rank)]
        if arrays.sent is not None:
            sent = arrays.sent[tensor][part.own]
        elif not (fine and self.form.stages.transforms):
            return None
        frame = self._frames[rank]
        self.take(part, frame, self._messages[rank].flags(frame), sent, self.rank)
        if (foreign := self._foreign.get(tensor)) is not None:
            sent -= foreign[part.own]
        return sent
