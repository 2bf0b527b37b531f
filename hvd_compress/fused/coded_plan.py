"""The exchange of a bucket's codes: what is sent and when, for whole tensors and for shards.

The message for a rank holds its shard of every tensor, or for all ranks whole tensors, end to end.
Before them come a header and a byte per tensor that says whether its values are finite.
"""

from __future__ import annotations

import contextlib
import operator
import zlib
from collections.abc import Generator, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, Spec
from hvd_compress.codecs import Codec
from hvd_compress.codecs.at_random import own_generator
from hvd_compress.fused.in_place import Arrays
from hvd_compress.fused.on_device import gathered, scattered
from hvd_compress.fused.stages import StagedPlan
from hvd_compress.kernels import loops_of
from hvd_compress.requests import Request
from hvd_compress.sharding import shards_of
from hvd_compress.times import begin_phase
from hvd_compress.wire.header import START, Header, Kind, failing, opened, padded

OWNED = "owner_residual"
_FLOAT32 = np.dtype(np.float32)
#: of a tensor in a message: its codes mean numbers; there are none, since the sender's values were
#: not finite; they mean what is not finite
FINE, NOT_FINITE, OVERFLOWS = 0, 1, 2
#: messages of all ranks may be as long as the longest where that is so little more
_LITTLE = 1.1
_CAUSES = "the ranks do not run the same version with the same compression options"


class Message:
    """The layout of a message: a header, a byte for each tensor, codes.

    In the header::

        offset  field
        3       kind: 6 = coded, of several tensors
        6       the lowest bits of the CRC-32 of the codecs' reprs: options must be the same
        8       the number of values

    Args:
        codecs: of all tensors.
        runs: of each tensor, the elements that are sent.
        size: the least number of bytes.

    Attributes:
        codes: the place of each tensor's.
        size: the number of bytes.
    """

    def __init__(self, codecs: Sequence[Codec], runs: Sequence[slice], size: int = 0) -> None:
        self.codes: list[slice] = []
        at = START + len(runs) + -len(runs) % 8
        for codec, run in zip(codecs, runs, strict=True):
            codes = codec.size(run.stop - run.start, _FLOAT32)
            self.codes.append(slice(at, at + codes))
            at += codes + -codes % 4  # where scales, which are float32, may begin
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
        """Return the bytes of the tensors in a message that arrived."""
        fail = failing(f"rank {sender}", _CAUSES)
        header = opened(frame, Kind.BUCKET, fail=fail)
        if frame.size != self.size:
            raise fail(f"{frame.size} bytes where {self.size} were expected")
        flags = self.flags(frame)
        if header != self._header or flags.max(initial=0) > OVERFLOWS:
            raise fail(f"no header of {self._header.number} values of {len(flags)} tensors")
        return flags


class Run(NamedTuple):
    """A run of elements of a tensor that is coded by itself, and the number of the message that its
    codes are in.  That is the rank that adds them up, if one does."""

    tensor: int
    own: slice
    message: int

    @property
    def size(self) -> int:
        return self.own.stop - self.own.start


class CodedPlan(StagedPlan):
    """The plan of a bucket whose values are coded: what is common to all memories.

    Args:
        form: a :class:`hvd_compress.fused.coded.FusedCodes`, which has ``codec`` and ``is_whole``.
        specs, key, step: as of :class:`hvd_compress.base.Plan`.

    Attributes:
        codecs: of the tensors.
        runs: all that this rank codes.
        messages: the layout of what is sent to each rank, or to all.
        mine: the runs of which this rank adds up what all send.
        replies: the layout of what each rank sends of that, and whether they have ``equal_sizes``.
        foreign: what is in residuals of shards that were this rank's, by tensor, flat.
    """

    def __init__(self, form: Any, specs: Sequence[Spec], key: Hashable, step: Context) -> None:
        super().__init__(form, specs, key, step)
        codec, is_whole = form.codec, form.is_whole
        self.is_whole, self._draws = is_whole, codec.draws
        self.codecs = [codec.for_shape(shape) for shape in self.shapes]
        pairs = list(zip(self.codecs, self.sizes, strict=True))
        shards = [[slice(0, n)] for n in self.sizes]
        if not is_whole:
            shards = [[*shards_of(n, self.size, codec.unit(n))] for codec, n in pairs]
        # Owners feed back what they leave out, whether a transform does or not.
        if any(t.feeds_back for t in form.stages.transforms) or not is_whole:
            for codec, own in zip(self.codecs, shards, strict=True):
                codec.check_feedback(max(shard.stop - shard.start for shard in own))
        columns = list(zip(*shards, strict=True))
        self.messages = [Message(self.codecs, column) for column in columns]
        of_runs = enumerate(shards)
        runs = [Run(i, own, r) for i, each in of_runs for r, own in enumerate(each)]
        self.runs = [run for run in runs if run.size]
        self.foreign: dict[int, np.ndarray] = {}
        self.mine: list[Run] = []
        self.replies, self.equal_sizes = self.messages, True
        if not is_whole:
            self.keys = (*self.keys, OWNED)
            self._own = [each[self.rank] for each in shards]
            self.mine = [run for run in self.runs if run.message == self.rank]
            #: what owned others' shards when it was last looked through, and how often that was
            #: written
            self._looked: tuple[list[Array], list[Any]] = [], []
            lengths = [message.size for message in self.messages]
            # Where messages stay on a device, nobody waits to learn sizes.
            is_little = max(lengths) * self.size <= _LITTLE * sum(lengths)
            self.equal_sizes = is_little or step.reads_device
            if self.equal_sizes:
                self.replies = [Message(self.codecs, column, max(lengths)) for column in columns]

    def randoms(self, runs: Sequence[Run], step: Context, turn: int = 0) -> list[Any]:
        """Return the random numbers of each run in a turn of a step, if codecs take any; those of
        one tensor have one generator."""
        if not self._draws:
            return [None] * len(runs)
        of_tensors: dict[int, Any] = {}
        for tensor in {run.tensor for run in runs}:
            name, codec = self.names[tensor], self.codecs[tensor]
            its = own_generator(step._replace(name=name), turn) if codec.draws else None
            of_tensors[tensor] = its
        return [of_tensors[run.tensor] for run in runs]

    def look(self, arrays: Sequence[Array]) -> None:
        """Find the contents of others' shards, if somebody else has written to ``arrays`` since the
        last step.  So it is after a change of the number of ranks."""
        now = [getattr(x, "_version", None) for x in arrays]
        known, versions = self._looked
        if now == versions and all(map(operator.is_, known, arrays)):
            return
        self.foreign = {}
        self._looked = [*arrays], now
        xp = backend_of(arrays[0])
        for i, (array, own) in enumerate(zip(arrays, self._own, strict=True)):
            owned = xp.to_numpy(array).reshape(-1)
            if owned[: own.start].any() or owned[own.stop :].any():
                foreign = owned.copy()
                foreign[own] = 0
                self.foreign[i] = foreign


@contextlib.contextmanager
def decoding() -> Iterator[None]:
    """Say of codes that mean no numbers where they come from."""
    try:
        yield
    except ValueError as error:
        raise failing("a rank", _CAUSES)(str(error)) from None


class CodedOnDevice(CodedPlan):
    """The plan of a bucket in a device's memory, with the same messages and the same bits as on the
    host.  Messages are written where they are sent from, and read where they arrive."""

    def __init__(self, form: Any, specs: Sequence[Spec], key: Hashable, step: Context) -> None:
        super().__init__(form, specs, key, step)
        like = specs[0].x
        loops = loops_of(like)
        self._step, self._joined = loops.CodesStep(self, like), loops.joined

    def meet(self, arrays: Arrays, step: Context) -> Generator[Request, Any, None]:
        try:
            yield from self._met(arrays, step)
        finally:
            self._step.forget()

    def _met(self, arrays: Arrays, step: Context) -> Generator[Request, Any, None]:
        xp, work, stages = backend_of(arrays.gradients[0]), self._step, self.form.stages
        x, out, *states = arrays.columns
        columns = dict(zip(self.keys, states, strict=True))
        owned = columns.pop(OWNED, None)
        begin_phase("encode")
        if owned is not None:
            self.look(owned.arrays)
        parts, whole = self._parts(arrays, step), self._joined(x.arrays)
        own = {key: self._joined(column.arrays) for key, column in columns.items()}
        updated = [
            stages.updated(whole[at], {key: state[at] for key, state in own.items()}, context)
            for at, context in parts
        ]
        passed_on, kept = xp.end_to_end([x for x, _ in updated]), [its for _, its in updated]
        frames = work.encode(passed_on, self.randoms(self.runs, step))
        del whole, own, updated, passed_on
        seals, checks = [m.seal for m in self.messages], [m.opened for m in self.replies]
        if owned is None:
            arrived = yield from gathered(frames[0], seals[0], checks * self.size, step)
        else:
            check = self.messages[self.rank].opened
            arrived = yield from scattered(frames, seals, check, step)
            begin_phase("add_up")
            reply = work.add_up(arrived, owned, self.randoms(self.mine, step, 1))
            seal = self.replies[self.rank].seal
            arrived = yield from gathered(reply, seal, checks, step, self.equal_sizes)
        begin_phase("add_up")
        mean = work.mean(arrived, arrays.dtypes[0])
        xp.write_into(out.arrays, mean)
        if stages.transforms:
            sent = work.sent()
            rows = zip(parts, kept, strict=True)
            found = [
                stages.settled(sent[at], its, mean[at], context) for (at, context), its in rows
            ]
            if stages.finishes:
                work.write("out", out, xp.end_to_end([direction for direction, _ in found]), False)
            for key, column in columns.items():
                work.write(key, column, xp.end_to_end([its[key] for _, its in found]))
        if owned is not None:
            work.write_owned(owned)

    def _parts(self, arrays: Arrays, step: Context) -> list[tuple[slice, Context]]:
        """Return the parts of the tensors end to end that transforms take at once, with their
        circumstances.  These are all of them, or each tensor if tensors have momenta of their
        own."""
        if len(set(arrays.momenta)) == 1:
            whole = slice(0, self._step.tensors[-1].stop)
            return [(whole, arrays.context(step, 0))]
        return [(at, arrays.context(step, i)) for i, at in enumerate(self._step.tensors)]
