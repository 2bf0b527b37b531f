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
import operator
from collections.abc import Generator, Hashable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, Spec
from hvd_compress.codecs import Codec
from hvd_compress.fused.code_messages import (
    CAUSES,
    FINE,
    NOT_FINITE,
    OVERFLOWS,
    Division,
    Message,
    Part,
    message_of_all,
    random_of,
)
from hvd_compress.fused.coded_on_device import ShardedOnDevice, WholeOnDevice
from hvd_compress.fused.in_place import Arrays, InPlacePlan, is_on_host, room
from hvd_compress.fused.kept import overlap
from hvd_compress.fused.stages import Sent, StagedForm, StagedPlan
from hvd_compress.kernels import Column, loops_of, threads
from hvd_compress.requests import Alltoall, Gather, Request
from hvd_compress.times import phase
from hvd_compress.wire.header import failing

_O = "owner_residual"


@dataclasses.dataclass(frozen=True, eq=False)
class FusedCodes(StagedForm):
    """A form for whole buckets; see :class:`hvd_compress.fused.in_place.InPlaceForm`.

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

    def plan(self, specs: Sequence[Spec], key: Hashable, step: Context) -> InPlacePlan:
        kind = _Sharded if is_on_host(specs[0].x) else ShardedOnDevice
        return kind(self, specs, key, step)


class FusedAllgather(FusedCodes):
    """Every rank gets the codes of all, and adds them up in the order of the ranks."""

    is_whole = True

    def plan(self, specs: Sequence[Spec], key: Hashable, step: Context) -> InPlacePlan:
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
    be: most often in the place of the gradients, which nobody needs any more.

    Attributes:
        columns: residuals, gradients, and where the old residuals are; flat arrays, one for each
            tensor.
        done: the runs of elements whose residuals are the new ones, by tensor.
    """

    def __init__(
        self,
        residuals: Sequence[np.ndarray],
        gradients: Sequence[np.ndarray],
        old: Sequence[np.ndarray],
    ) -> None:
        self.columns = residuals, gradients, old
        self.done: dict[int, list[slice]] = {}

    def undo(self) -> None:
        """Let all tensors that were not settled have their old residuals."""
        for tensor in list(self.done):
            self.put_back(tensor)

    def put_back(self, tensor: int) -> None:
        """Let a tensor have its old residual."""
        residuals, _, old = self.columns
        for own in self.done.pop(tensor):
            np.copyto(residuals[tensor][own], old[tensor][own])

    def settle(self, finite: Sequence[bool]) -> None:
        """Let tensors have their new residuals where they are finite, and the old ones elsewhere,
        before results are written."""
        for tensor, fine in enumerate(finite):
            if not fine:
                self.put_back(tensor)
        self.done.clear()


class _Plan(StagedPlan, abc.ABC):
    """The plan of a bucket that both kinds of exchanges keep."""

    form: FusedCodes
    #: elements of the longest part
    longest: int
    #: to other ranks, and the memory for them
    messages: Sequence[Message]
    frames: Sequence[np.ndarray]
    #: all parts of these, one tensor after the other, and where each is
    jobs: Sequence[tuple[Part, np.ndarray]]

    def __init__(
        self, form: FusedCodes, specs: Sequence[Spec], key: Hashable, step: Context
    ) -> None:
        super().__init__(form, specs, key, step)
        self.codecs = [form.codec.for_shape(shape) for shape in self.shapes]
        self.bound = [codec.bound() for codec in self.codecs]
        #: what is in residuals of shards that were this rank's, by tensor
        self.foreign: dict[int, np.ndarray] = {}

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
        if overlap(
            Column(kept, self.sizes)
        ):  # what is kept of one tensor would be another's gradient
            kept = [np.empty_like(x) for x in kept]
        return _Fed(views.states[key], views.x, kept)

    def randoms(self, step: Context, turn: int = 0) -> Sequence[Any]:
        """Return the random numbers of each tensor in a step, if codecs take any."""
        if not self.form.codec.draws:
            return [None] * len(self.codecs)
        pairs = zip(self.codecs, self.names, strict=True)
        return [random_of(codec, name, step, turn) for codec, name in pairs]

    def encode(self, arrays: Arrays, step: Context, fed: _Fed | None) -> None:
        """Write the codes of all tensors into the messages."""
        views, randoms, n, bad = arrays.views(), self.randoms(step), threads(), set[int]()
        with np.errstate(over="ignore", invalid="ignore"):
            for part, frame in self.jobs:
                tensor, own, codes = part
                code = frame[codes]
                if fed is None:
                    its = arrays.context(step, tensor)
                    x = self.passed_on(views, tensor, own, its, self.longest)
                    if tensor in self.foreign:
                        x = x + self.foreign[tensor][own]
                    fine = self.codecs[tensor].put(x, randoms[tensor], code)
                else:
                    residual, x, old = map(operator.itemgetter(tensor), fed.columns)
                    feed, random, left = self.bound[tensor].feed, randoms[tensor], residual[own]
                    fine, _ = feed(left, x[own], old[own], [], random, left, code, n)
                    fed.done.setdefault(tensor, []).append(own)
                if not fine:
                    code[:] = 0
                    bad.add(tensor)
        for message, frame in zip(self.messages, self.frames, strict=True):
            flags = message.flags(frame)
            flags[:] = FINE
            flags[[*bad]] = NOT_FINITE  # nobody shall take the rest of such a tensor for the whole
            message.seal(frame)

    def take(self, part: Part, frame: np.ndarray, flags: np.ndarray, out: np.ndarray) -> None:
        """Write what a part of a message of this rank holds to ``out``."""
        if flags[part.tensor] == NOT_FINITE:
            out.fill(np.nan)
        else:
            self.codecs[part.tensor].decode_to(frame[part.codes], out)

    def off(self, part: Part, frame: np.ndarray) -> Sent:
        """Return what takes off the values of a part of a message of this rank."""
        return functools.partial(self.codecs[part.tensor].take_off, frame[part.codes])


class _Whole(_Plan):
    """The plan of a bucket whose codes go to all ranks."""

    def __init__(
        self, form: FusedCodes, specs: Sequence[Spec], key: Hashable, step: Context
    ) -> None:
        super().__init__(form, specs, key, step)
        message = message_of_all(self.codecs, self.sizes, form.stages.feeds_back)
        self.messages, self.frames = [message], [np.zeros(message.size, np.uint8)]
        self.jobs = [(part, self.frames[0]) for part in message.parts]
        self.requests = [Gather(self.frames[0], equal_sizes=True)]
        self.longest = max(self.sizes)

    def met(
        self, arrays: Arrays, step: Context, fed: _Fed | None
    ) -> Generator[Request, Any, Sequence[bool]]:
        xp = backend_of(arrays.gradients[0])
        with phase("encode"):
            self.encode(arrays, step, fed)
        replies = yield self.requests[0].carrying([xp.from_numpy(self.frames[0], None)])
        with phase("add_up"):
            return self._finish(arrays, [xp.to_numpy(x) for x in replies], step, fed)

    def _finish(
        self,
        arrays: Arrays,
        frames: Sequence[np.ndarray],
        step: Context,
        fed: _Fed | None,
    ) -> Sequence[bool]:
        (message,), views = self.messages, arrays.views()
        flags = [message.opened(frame, rank) for rank, frame in enumerate(frames)]
        finite: list[bool] = (~np.any(np.equal(flags, NOT_FINITE), axis=0)).tolist()
        own, n, transforms = message.flags(self.frames[0]), threads(), self.form.stages.transforms
        with np.errstate(over="ignore", invalid="ignore"), _decoding():
            for part in message.parts:
                i, out = part.tensor, views.out[part.tensor]
                # What is fed back is kept where the results will be.
                total = room(self.longest)[0, : self.sizes[i]] if transforms else out
                if finite[i]:
                    codes = list(map(operator.itemgetter(part.codes), frames))
                    by = 1 if transforms else self.size
                    finite[i] = self.bound[i].mean(codes, by, total, True, n)
                else:
                    total.fill(np.nan)
                if not transforms:
                    continue
                if fed is not None:
                    if not finite[i]:
                        fed.put_back(i)
                    fed.done.pop(i, None)
                    np.divide(total, np.float32(self.size), out=out)
                    continue
                off: Sent | None = None
                if finite[i] and self.form.stages.only_feeds_back:
                    off = self.off(part, self.frames[0])
                elif finite[i]:
                    off = room(self.longest)[1, : self.sizes[i]]
                    self.take(part, self.frames[0], own, off)

                def mean(out: np.ndarray, total: np.ndarray = total) -> None:
                    np.divide(total, np.float32(self.size), out=out)

                self.settle(views, i, part.own, arrays.context(step, i), off, mean)
        return finite


class _Sharded(_Plan):
    """The plan of a bucket of whose tensors every rank adds up a shard."""

    def __init__(
        self, form: FusedCodes, specs: Sequence[Spec], key: Hashable, step: Context
    ) -> None:
        super().__init__(form, specs, key, step)
        self.keys = (*self.keys, _O)
        self._division = division = Division(self.codecs, self.sizes, self.size)
        self.messages, self._replies = division.messages, division.replies
        self.frames = [np.zeros(message.size, np.uint8) for message in self.messages]
        pairs = [(i, rank) for i, owners in enumerate(division.owners) for rank in owners]
        self.jobs = [(self.messages[rank].parts[i], self.frames[rank]) for i, rank in pairs]
        #: the same of replies, with the ranks that they come from
        self._parts = [(self._replies[rank].parts[i], rank) for i, rank in pairs]
        self._mine = [i for i, rank in pairs if rank == self.rank]
        self._reply = np.zeros(self._replies[self.rank].size, np.uint8)
        self.requests = [Alltoall(self.frames), Gather(self._reply, division.has_equal_replies)]
        self._shards = division.own(self.rank)
        lengths = [own.stop - own.start for own in self._shards]
        self.longest = max(own.stop - own.start for row in division.shards for own in row)
        #: of the rank's own shards: their sums, and then what their codes leave out
        self._left = [np.empty(n, np.float32) for n in lengths]
        #: what owned others' shards when it was last looked through, and how often it was written
        self._looked: tuple[list[Array], list[Any]] = [], []

    def met(
        self, arrays: Arrays, step: Context, fed: _Fed | None
    ) -> Generator[Request, Any, Sequence[bool]]:
        xp = backend_of(arrays.gradients[0])
        with phase("encode"):
            self._look(arrays.states[_O], arrays.views().states[_O])
            fed = None if self.foreign else fed
            self.encode(arrays, step, fed)
        send, reply = self.requests
        received = yield send.carrying([xp.from_numpy(frame, None) for frame in self.frames])
        with phase("add_up"):
            frame = self._add_up(arrays, [xp.to_numpy(x) for x in received], step)
        replies = yield reply.carrying([xp.from_numpy(frame, None)])
        with phase("add_up"):
            return self._finish(arrays, [xp.to_numpy(x) for x in replies], step, fed)

    def _look(self, arrays: Sequence[Array], views: Sequence[np.ndarray]) -> None:
        """Find what is in shards of others, where somebody else has written since the last step:
        after the number of ranks has changed, say."""
        now = [getattr(x, "_version", None) for x in arrays]
        known, versions = self._looked
        if now == versions and all(map(operator.is_, known, arrays)):
            return
        self.foreign = {}
        if self.memory is None:  # else arrays are new in every step, and others wait for theirs
            self._looked = [*arrays], now
        for i, view in enumerate(views):
            own = self._shards[i]
            if view[: own.start].any() or view[own.stop :].any():
                foreign = view.copy()
                foreign[own] = 0
                self.foreign[i] = foreign

    def _add_up(self, arrays: Arrays, frames: Sequence[np.ndarray], step: Context) -> np.ndarray:
        """Return the message of the sums of the rank's own shards."""
        message, reply = self.messages[self.rank], self._replies[self.rank]
        theirs = [message.opened(frame, rank) for rank, frame in enumerate(frames)]
        bad = np.any(np.equal(theirs, NOT_FINITE), axis=0).tolist()
        owned, flags = arrays.views().states[_O], reply.flags(self._reply)
        flags[:] = FINE
        randoms, n = self.randoms(step, 1), threads()
        with np.errstate(over="ignore", invalid="ignore"), _decoding():
            for i in self._mine:
                code, left = self._reply[reply.parts[i].codes], self._left[i]
                at, fine, is_left = message.parts[i].codes, False, True
                if not bad[i]:
                    base = owned[i][self._shards[i]]
                    codes = list(map(operator.itemgetter(at), frames))
                    feed, random = self.bound[i].feed, randoms[i]
                    fine, is_left = feed(base, None, None, codes, random, left, code, n)
                if not fine:
                    code[:] = 0
                    flags[i] = NOT_FINITE
                elif not is_left:
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
        views, n = arrays.views(), threads()
        is_plain = fed is not None or not self.form.stages.transforms
        if fed is not None:
            fed.settle(finite)
        with np.errstate(over="ignore", invalid="ignore"), _decoding():
            for (part, rank), (sent, frame) in zip(self._parts, self.jobs, strict=True):
                tensor, own, codes = part
                if not is_plain:
                    mean = functools.partial(self._mean, part, frames[rank], flags[rank])
                    off = self._sent(sent, rank, frame) if finite[tensor] else None
                    self.settle(views, tensor, own, arrays.context(step, tensor), off, mean)
                elif flags[rank][tensor] == NOT_FINITE:
                    views.out[tensor][own] = np.nan
                else:
                    its, out = [frames[rank][codes]], views.out[tensor][own]
                    self.bound[tensor].mean(its, self.size, out, False, n)
        for i, fine in enumerate(finite):
            if fine:
                owned = views.states[_O][i]
                if self.foreign.pop(i, None) is not None:
                    owned.fill(0)
                owned[self._shards[i]] = self._left[i]
        return finite

    def _mean(self, part: Part, frame: np.ndarray, flags: np.ndarray, out: np.ndarray) -> None:
        """Write the average of a shard."""
        if flags[part.tensor] == NOT_FINITE:
            out.fill(np.nan)
        else:
            codec = self.bound[part.tensor]
            codec.mean([frame[part.codes]], self.size, out, False, threads())

    def _sent(self, part: Part, rank: int, frame: np.ndarray) -> Sent:
        """Return what was sent of a shard."""
        if part.tensor not in self.foreign and self.form.stages.only_feeds_back:
            return self.off(part, frame)
        sent = room(self.longest)[1, : part.own.stop - part.own.start]
        self.take(part, frame, self.messages[rank].flags(frame), sent)
        if (foreign := self.foreign.get(part.tensor)) is not None:
            sent -= foreign[part.own]
        return sent
