"""Codes of whole buckets: one message and one header for all tensors, and no fresh memory.

A chain of elementwise transforms and codes, such as error feedback, does for a bucket at once what
its blocks do for one tensor after the other, and gives the same bits; tests hold the two equal.
Shards are those that each tensor has by itself: the message for a rank holds that rank's shard of
every tensor, end to end, behind a byte a tensor that says whether its values are finite.

Where all that a chain does is to feed back what codes leave out, residuals become the new ones in
the pass that codes them; the old ones are kept where the results will be until all ranks' values
are known to be finite.  Else the gradient and this rank's own codes are kept, and states are
written then.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import math
from collections.abc import Generator, Hashable, Iterator, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, Spec
from hvd_compress.codecs import Codec
from hvd_compress.fused.bucket import Arrays, Bucket, Views, is_on_host, room
from hvd_compress.fused.code_messages import (
    CAUSES,
    FINE,
    NOT_FINITE,
    OVERFLOWS,
    Division,
    Part,
    message_of_all,
    random_of,
)
from hvd_compress.fused.coded_on_device import ShardedOnDevice, WholeOnDevice
from hvd_compress.fused.kept import overlap
from hvd_compress.fused.stages import Sent, Staged, StagedBucket
from hvd_compress.kernels import Column, loops_of
from hvd_compress.kernels.codecs import Finite, Sums
from hvd_compress.requests import Alltoall, Gather, Request
from hvd_compress.times import phase
from hvd_compress.wire.header import failing

_O = "owner_residual"

#: parts, messages that have them, and the bytes of their tensors
_OfOne: TypeAlias = tuple[list[Part], list[np.ndarray], list[np.ndarray]]


@dataclasses.dataclass(frozen=True, eq=False)
class FusedCodes(Staged):
    """The exchange of all tensors of a bucket; see :class:`hvd_compress.fused.bucket.InPlace`.

    Attributes:
        codec: of all values.
    """

    codec: Codec
    #: whether each tensor is one run of elements for its codec
    is_whole: ClassVar[bool]

    def weight(self, context: Context) -> int:
        return math.prod(context.shape)

    def takes(self, x: Array) -> bool:
        if super().takes(x):
            return True
        loops, n, stages = loops_of(x), backend_of(x).size(x), self.stages
        if loops is None or (stages.transforms and not stages.only_feeds_back):
            return False
        taken: bool = loops.Codes.takes(self.codec, n, self.is_whole)
        return taken


class FusedAlltoall(FusedCodes):
    """Every rank adds up one shard of each tensor, and codes what comes out."""

    is_whole = False

    def plan(self, specs: Sequence[Spec], key: Hashable, step: Context) -> Bucket:
        kind = _Sharded if is_on_host(specs[0].x) else ShardedOnDevice
        return kind(self, specs, key, step)


class FusedAllgather(FusedCodes):
    """Every rank gets the codes of all, and adds them up in the order of the ranks."""

    is_whole = True

    def plan(self, specs: Sequence[Spec], key: Hashable, step: Context) -> Bucket:
        kind = _Whole if is_on_host(specs[0].x) else WholeOnDevice
        return kind(self, specs, key, step)


@contextlib.contextmanager
def _decoding() -> Iterator[None]:
    """Say of codes that mean no numbers where they come from."""
    try:
        yield
    except ValueError as error:
        raise failing("a rank", CAUSES)(str(error)) from None


class _Fed:
    """Residuals of a bucket that are the new ones already; the old ones are where the results will
    be: most often in the place of the gradients, which nobody needs any more."""

    def __init__(
        self,
        residuals: Sequence[np.ndarray],
        gradients: Sequence[np.ndarray],
        old: Sequence[np.ndarray],
    ) -> None:
        self._residuals, self._x, self._old = residuals, gradients, old
        self._done: dict[int, list[slice]] = {}

    def sums(self, part: Part) -> Sums:
        """Return the sums of gradients and residuals."""
        residual, x, old = (
            column[part.tensor][part.own] for column in (self._residuals, self._x, self._old)
        )
        return Sums(residual, residual, x, kept=old)

    def is_done(self, part: Part) -> None:
        """Note that a part's residuals are the new ones."""
        self._done.setdefault(part.tensor, []).append(part.own)

    def settle(self, tensor: int, fine: bool) -> None:
        """Let a tensor have its new residual, or the old one, before the result is written."""
        parts = self._done.pop(tensor)
        if not fine:
            self._put_back(tensor, parts)

    def undo(self) -> None:
        """Let all tensors that were not settled have their old residuals."""
        for tensor, parts in self._done.items():
            self._put_back(tensor, parts)

    def _put_back(self, tensor: int, parts: Sequence[slice]) -> None:
        for own in parts:
            np.copyto(self._residuals[tensor][own], self._old[tensor][own])


class _Bucket(StagedBucket, abc.ABC):
    """The record of a bucket that both kinds of exchanges keep."""

    form: FusedCodes
    #: elements of the longest part
    longest: int

    def __init__(
        self, form: FusedCodes, specs: Sequence[Spec], key: Hashable, step: Context
    ) -> None:
        super().__init__(form, specs, key, step)
        self.codecs = [form.codec.for_shape(shape) for shape in self.shapes]

    def meet(self, arrays: Arrays, step: Context) -> Generator[Request, Any, Sequence[bool]]:
        fed = self._fed(arrays)
        try:
            return (yield from self.met(arrays, step, fed))
        except BaseException:  # also of who gives the exchange up
            if fed is not None:
                fed.undo()
            raise

    @abc.abstractmethod
    def met(
        self, arrays: Arrays, step: Context, fed: _Fed | None
    ) -> Generator[Request, Any, Sequence[bool]]:
        """See :meth:`meet`; what is ``fed`` is written in the pass that codes it."""

    def _fed(self, arrays: Arrays) -> _Fed | None:
        """Return residuals that can be; ``None`` if there is more to be done."""
        if not self.form.stages.only_feeds_back:
            return None
        views, (key,) = arrays.views(), self.form.stages.keys
        kept = views.out
        if overlap(Column(kept)):  # what is kept of one tensor would be another's gradient
            kept = [np.empty_like(x) for x in kept]
        return _Fed(views.states[key], views.x, kept)

    def random(self, tensor: int, step: Context, turn: int = 0) -> Any:
        """Return the random numbers of a tensor in a step, if its codec takes any."""
        return random_of(self.codecs[tensor], self.names[tensor], step, turn)

    def put(
        self,
        part: Part,
        x: np.ndarray | Sums,
        random: Any,
        frame: np.ndarray,
        flags: np.ndarray,
    ) -> Finite:
        """Write the codes of ``x``, or of sums, into a message; return what is finite."""
        codec, code = self.codecs[part.tensor], frame[part.codes]
        if isinstance(x, Sums):
            found = codec.feed(x, random, code)
        else:
            found = Finite(codec.put(x, random, code), True)
        if not found.sums:
            code[:] = 0
            flags[part.tensor] = NOT_FINITE
        return found

    def take(
        self,
        part: Part,
        frame: np.ndarray,
        flags: np.ndarray,
        out: np.ndarray,
    ) -> None:
        """Write what a part of a message of this rank holds to ``out``."""
        if flags[part.tensor] == NOT_FINITE:
            out.fill(np.nan)
        else:
            self.codecs[part.tensor].decode_to(frame[part.codes], out)

    def mean(
        self,
        parts: Sequence[Part],
        frames: Sequence[np.ndarray],
        flags: Sequence[np.ndarray],
        by: int,
        out: np.ndarray,
        add: bool = False,
    ) -> bool:
        """Write what a part of a message holds, or with ``add`` the sum of several, divided by a
        number, to ``out``; return whether it was finite before."""
        tensor = parts[0].tensor
        if any(own[tensor] == NOT_FINITE for own in flags):
            out.fill(np.nan)
            return False
        codes = [frame[part.codes] for part, frame in zip(parts, frames, strict=True)]
        with _decoding():
            return self.codecs[tensor].mean(codes, by, out, add)

    def coded(
        self, arrays: Arrays, views: Views, part: Part, step: Context, fed: _Fed | None
    ) -> np.ndarray | Sums:
        """Return what is coded of a part."""
        if fed is not None:
            return fed.sums(part)
        its = arrays.context(step, part.tensor)
        return self.passed_on(views, part.tensor, part.own, its, self.longest)

    def off(self, part: Part, frame: np.ndarray) -> Sent:
        """Return what takes off the values of a part of a message of this rank."""
        return functools.partial(self.codecs[part.tensor].take_off, frame[part.codes])


class _Whole(_Bucket):
    """A bucket whose codes go to all ranks."""

    def __init__(
        self, form: FusedCodes, specs: Sequence[Spec], key: Hashable, step: Context
    ) -> None:
        super().__init__(form, specs, key, step)
        self._message = message_of_all(self.codecs, self.sizes, form.stages.feeds_back)
        self._frame = np.zeros(self._message.size, np.uint8)
        self.requests = [Gather(self._frame, equal_sizes=True)]
        self.longest = max(self.sizes)

    def met(
        self, arrays: Arrays, step: Context, fed: _Fed | None
    ) -> Generator[Request, Any, Sequence[bool]]:
        xp = backend_of(arrays.gradients[0])
        with phase("encode"):
            frame = self._encode(arrays, step, fed)
        replies = yield self.requests[0].carrying([xp.from_numpy(frame, None)])
        with phase("add_up"):
            return self._finish(arrays, [xp.to_numpy(x) for x in replies], step, fed)

    def _encode(self, arrays: Arrays, step: Context, fed: _Fed | None) -> np.ndarray:
        views, frame = arrays.views(), self._frame
        flags = self._message.flags(frame)
        flags[:] = FINE
        with np.errstate(over="ignore", invalid="ignore"):
            for i, part in enumerate(self._message.parts):
                x = self.coded(arrays, views, part, step, fed)
                self.put(part, x, self.random(i, step), frame, flags)
                if fed is not None:
                    fed.is_done(part)
        return self._message.seal(frame)

    def _finish(
        self,
        arrays: Arrays,
        frames: Sequence[np.ndarray],
        step: Context,
        fed: _Fed | None,
    ) -> Sequence[bool]:
        flags = [self._message.opened(frame, rank) for rank, frame in enumerate(frames)]
        own = self._message.flags(self._frame)
        views, finite = arrays.views(), []
        with np.errstate(over="ignore", invalid="ignore"):
            for i, part in enumerate(self._message.parts):
                parts, out = [part] * len(frames), views.out[i]
                if not self.form.stages.transforms:
                    finite.append(self.mean(parts, frames, flags, self.size, out, add=True))
                    continue
                total, sent = room(self.longest)[:, : self.sizes[i]]
                fine = self.mean(parts, frames, flags, 1, total, add=True)
                finite.append(fine)
                if fed is not None:
                    fed.settle(i, fine)
                    np.divide(total, np.float32(self.size), out=out)
                    continue
                off: Sent | None = None
                if fine and self.form.stages.only_feeds_back:
                    off = self.off(part, self._frame)
                elif fine:
                    self.take(part, self._frame, own, sent)
                    off = sent

                def mean(out: np.ndarray, total: np.ndarray = total) -> None:
                    np.divide(total, np.float32(self.size), out=out)

                self.settle(views, i, part.own, arrays.context(step, i), off, mean)
        return finite


class _Sharded(_Bucket):
    """A bucket of whose tensors every rank adds up a shard."""

    def __init__(
        self, form: FusedCodes, specs: Sequence[Spec], key: Hashable, step: Context
    ) -> None:
        super().__init__(form, specs, key, step)
        self.keys = (*self.keys, _O)
        self._division = division = Division(self.codecs, self.sizes, self.size)
        self._shards, self._owners = division.shards, division.owners
        self._messages, self._replies = division.messages, division.replies
        self._frames = [np.zeros(message.size, np.uint8) for message in self._messages]
        self._reply = np.zeros(self._replies[self.rank].size, np.uint8)
        self.requests = [Alltoall(self._frames), Gather(self._reply, division.has_equal_replies)]
        self.longest = max(own.stop - own.start for row in self._shards for own in row)
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

    def met(
        self, arrays: Arrays, step: Context, fed: _Fed | None
    ) -> Generator[Request, Any, Sequence[bool]]:
        xp = backend_of(arrays.gradients[0])
        with phase("encode"):
            views = arrays.views()
            self._look(arrays.states[_O], views.states[_O])
            fed = None if self._foreign else fed
            frames = self._encode(arrays, views, step, fed)
        send, reply = self.requests
        received = yield send.carrying([xp.from_numpy(frame, None) for frame in frames])
        with phase("add_up"):
            frame = self._add_up(arrays, [xp.to_numpy(x) for x in received], step)
        replies = yield reply.carrying([xp.from_numpy(frame, None)])
        with phase("add_up"):
            return self._finish(arrays, [xp.to_numpy(x) for x in replies], step, fed)

    def _encode(
        self, arrays: Arrays, views: Views, step: Context, fed: _Fed | None
    ) -> list[np.ndarray]:
        """Return a message for each rank."""
        pairs = zip(self._messages, self._frames, strict=True)
        flags = [message.flags(frame) for message, frame in pairs]
        for own in flags:
            own[:] = FINE
        with np.errstate(over="ignore", invalid="ignore"):
            for i, owners in enumerate(self._owners):
                random, fine = self.random(i, step), True
                for rank in owners:
                    part = self._messages[rank].parts[i]
                    x = self._of_shard(arrays, views, part, step, fed)
                    fine &= self.put(part, x, random, self._frames[rank], flags[rank]).sums
                    if fed is not None:
                        fed.is_done(part)
                if not fine:  # nobody shall take the rest of it for the whole
                    for own in flags:
                        own[i] = NOT_FINITE
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
        self._foreign = {}
        if self.memory is None:  # else arrays are new in every step, and others wait for theirs
            self._looked = now
        for i, view in enumerate(views):
            own = self._shards[i][self.rank]
            if view[: own.start].any() or view[own.stop :].any():
                foreign = view.copy()
                foreign[own] = 0
                self._foreign[i] = foreign

    def _of_shard(
        self, arrays: Arrays, views: Views, part: Part, step: Context, fed: _Fed | None
    ) -> np.ndarray | Sums:
        """Return what is coded of a shard, ``x`` in the blocks' words."""
        x = self.coded(arrays, views, part, step, fed)
        if (foreign := self._foreign.get(part.tensor)) is not None:
            x = x + foreign[part.own]
        return x

    def _add_up(self, arrays: Arrays, frames: Sequence[np.ndarray], step: Context) -> np.ndarray:
        """Return the message of the sums of the rank's own shards."""
        message, reply = self._messages[self.rank], self._replies[self.rank]
        theirs = [message.opened(frame, rank) for rank, frame in enumerate(frames)]
        owned, flags = arrays.views().states[_O], reply.flags(self._reply)
        flags[:] = FINE
        with np.errstate(over="ignore", invalid="ignore"):
            for i, (part, own) in enumerate(zip(message.parts, reply.parts, strict=True)):
                if self.rank not in self._owners[i]:
                    continue
                if any(its[i] == NOT_FINITE for its in theirs):
                    self._reply[own.codes] = 0
                    flags[i] = NOT_FINITE
                    continue
                codes = [frame[part.codes] for frame in frames]
                sums = Sums(owned[i][part.own], self._left[i], codes=codes)
                with _decoding():
                    fine = self.put(own, sums, self.random(i, step, 1), self._reply, flags)
                if fine.sums and not fine.left:
                    flags[i] = OVERFLOWS
        return reply.seal(self._reply)

    def _finish(
        self,
        arrays: Arrays,
        frames: Sequence[np.ndarray],
        step: Context,
        fed: _Fed | None,
    ) -> Sequence[bool]:
        flags = [
            reply.opened(frame, rank)
            for rank, (reply, frame) in enumerate(zip(self._replies, frames, strict=True))
        ]
        finite = [bool(fine) for fine in ~np.any(flags, axis=0)]
        views = arrays.views()
        with np.errstate(over="ignore", invalid="ignore"):
            for i, fine in enumerate(finite):
                if fed is not None:
                    fed.settle(i, fine)
                for rank in self._owners[i]:
                    own, reply = self._shards[i][rank], self._replies[rank].parts[i]
                    message = [reply], [frames[rank]], [flags[rank]]
                    if fed is not None:
                        self.mean(*message, self.size, views.out[i][own])
                        continue

                    def mean(out: np.ndarray, message: _OfOne = message) -> None:
                        self.mean(*message, self.size, out)

                    sent = self._sent(i, rank) if fine else None
                    self.settle(views, i, own, arrays.context(step, i), sent, mean)
                if fine:
                    owned = views.states[_O][i]
                    if self._foreign.pop(i, None) is not None:
                        owned.fill(0)
                    owned[self._shards[i][self.rank]] = self._left[i]
        return finite

    def _sent(self, tensor: int, rank: int) -> Sent | None:
        """Return what was sent of a shard, if the transforms ask."""
        part, frame = self._messages[rank].parts[tensor], self._frames[rank]
        if not self.form.stages.transforms:
            return None
        if tensor not in self._foreign and self.form.stages.only_feeds_back:
            return self.off(part, frame)
        sent = room(self.longest)[1, : self._length(tensor, rank)]
        self.take(part, frame, self._messages[rank].flags(frame), sent)
        if (foreign := self._foreign.get(tensor)) is not None:
            sent -= foreign[part.own]
        return sent
