"""The exchange of a bucket's codes: what is sent and when, for whole tensors and for shards.

The message for a rank holds its shard of every tensor, or for all ranks whole tensors, end to end
behind a header and a byte a tensor that says whether its values are finite.
"""

from __future__ import annotations

import abc
import contextlib
import operator
import zlib
from collections.abc import Generator, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, Spec
from hvd_compress.codecs import Codec
from hvd_compress.fused.in_place import Arrays
from hvd_compress.fused.stages import StagedForm, StagedPlan
from hvd_compress.operators.at_random import own_generator
from hvd_compress.requests import Alltoall, Gather, Request
from hvd_compress.sharding import shards_of
from hvd_compress.times import phase
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
        size: at least so many bytes.

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
        if header != self._header or flags.max(initial=0) > OVERFLOWS:
            raise fail(f"no header of {self._header.number} values of {len(flags)} tensors")
        return flags


class Run(NamedTuple):
    """A run of elements of a tensor, ``own``, that is coded by itself, and the number of the
    message that its codes are in: that of the rank that adds them up, if one does."""

    tensor: int
    own: slice
    message: int

    @property
    def size(self) -> int:
        return self.own.stop - self.own.start


class CodedStep(abc.ABC):
    """The numbers of a bucket in one step, in one kind of memory: those of C++ and NumPy are
    :class:`hvd_compress.fused.coded_on_host.StepOnHost`.

    Args:
        plan: that of the bucket.
        arrays, step: as of :meth:`hvd_compress.fused.in_place.InPlacePlan.meet`.
    """

    def __init__(self, plan: CodedPlan, arrays: Arrays, step: Context) -> None:
        self.plan, self.arrays, self.step = plan, arrays, step
        self.stages = plan.form.stages

    @staticmethod
    @abc.abstractmethod
    def prepare(plan: CodedPlan, like: Array) -> Any:
        """Return what all steps need, for arrays in memory where ``like`` is."""

    @abc.abstractmethod
    def on_host(self, key: str) -> list[np.ndarray]:
        """Return an entry of the states of all tensors as flat arrays of NumPy, which nobody
        writes to."""

    @abc.abstractmethod
    def from_host(self, x: np.ndarray) -> Array:
        """Return such an array where the states are."""

    @abc.abstractmethod
    def encode(self) -> Sequence[bool]:
        """Write the codes of all runs; return which are finite.  Of others codes mean nothing."""

    @abc.abstractmethod
    def add_up(
        self, codes: Sequence[Sequence[np.ndarray]], known: Sequence[bool]
    ) -> Sequence[tuple[bool, bool]]:
        """Write the codes of what the rank's own shards add up to; return which sums are finite,
        and what is left of them.

        Args:
            codes: of each shard, those of all ranks.
            known: whether all of them mean numbers; of others nothing has to be done.
        """

    @abc.abstractmethod
    def settle(
        self, codes: Sequence[Sequence[np.ndarray]], known: Sequence[bool], finite: list[bool]
    ) -> list[bool]:
        """Write averages, and states of tensors that are finite; return which are.

        Args:
            codes: of each run, that of its sum, or those of all ranks.
            known: whether these mean numbers.
            finite: whether all of a tensor do; of sums of whole tensors it is found out here.
        """

    def undo(self) -> None:  # noqa: B027
        """Give tensors that are not settled the states that they had."""


class CodedPlan(StagedPlan):
    """The plan of a bucket whose values are coded.

    Args:
        form, specs, key, step: as of :class:`hvd_compress.base.Plan`.
        codec: of all values.
        is_whole: every rank adds up whole tensors; else a shard of each, and codes what comes out.
        work: what does the work of a step.

    Attributes:
        codecs: of the tensors, and their functions for arrays in host memory (``bound``).
        runs: all that this rank codes, and ``longest``, the elements of the longest.
        codes: the place of each run's codes in what is sent.
        mine: the runs of which this rank adds up what all send, and ``sums``, the place of each
            one's codes in what is sent of that.
        foreign: what is in residuals of shards that were this rank's, by tensor.
        prepared: what the work of all steps needs.
    """

    def __init__(
        self,
        form: StagedForm,
        specs: Sequence[Spec],
        key: Hashable,
        step: Context,
        codec: Codec,
        is_whole: bool,
        work: type[CodedStep],
    ) -> None:
        super().__init__(form, specs, key, step)
        self.is_whole, self._draws, self._work = is_whole, codec.draws, work
        self.codecs = [codec.for_shape(shape) for shape in self.shapes]
        self.bound = [codec.bound() for codec in self.codecs]
        pairs = list(zip(self.codecs, self.sizes, strict=True))
        shards = [[slice(0, n)] for n in self.sizes]
        if not is_whole:
            shards = [shards_of(n, self.size, codec.unit(n)) for codec, n in pairs]
        # Owners feed back what they leave out, whether a transform does or not.
        if form.stages.feeds_back or not is_whole:
            for codec, own in zip(self.codecs, shards, strict=True):
                codec.check_feedback(max(shard.stop - shard.start for shard in own))
        columns = list(zip(*shards, strict=True))
        self._messages = [Message(self.codecs, column) for column in columns]
        self._frames = [np.zeros(message.size, np.uint8) for message in self._messages]
        of_runs = enumerate(shards)
        runs = [Run(i, own, r) for i, each in of_runs for r, own in enumerate(each)]
        self.runs = [run for run in runs if run.size]
        self.longest = max(run.size for run in self.runs)
        self.codes = [self._code(self._messages[r], self._frames[r], i) for i, _, r in self.runs]
        self.foreign: dict[int, Array] = {}
        self.mine: list[Run] = []
        self.sums: list[np.ndarray] = []
        if is_whole:
            self.requests = [Gather(self._frames[0], equal_sizes=True)]
        else:
            self._divide([each[self.rank] for each in shards], columns)
        self.prepared = work.prepare(self, specs[0].x)

    def _divide(self, own: list[slice], columns: Sequence[Sequence[slice]]) -> None:
        """Prepare for a second message, with what this rank's ``own`` shards add up to."""
        self.keys = (*self.keys, OWNED)
        self._own = own
        self.mine = [run for run in self.runs if run.message == self.rank]
        #: what owned others' shards when it was last looked through, and how often it was written
        self._looked: tuple[list[Array], list[Any]] = [], []
        lengths = [message.size for message in self._messages]
        are_equal = max(lengths) * self.size <= _LITTLE * sum(lengths)
        self._replies = self._messages
        if are_equal:
            self._replies = [Message(self.codecs, column, max(lengths)) for column in columns]
        reply = self._replies[self.rank]
        self._reply = np.zeros(reply.size, np.uint8)
        self.sums = [self._code(reply, self._reply, run.tensor) for run in self.mine]
        self.requests = [Alltoall(self._frames), Gather(self._reply, are_equal)]

    @staticmethod
    def _code(message: Message, frame: np.ndarray, tensor: int) -> np.ndarray:
        return frame[message.codes[tensor]]

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

    def meet(self, arrays: Arrays, step: Context) -> Generator[Request, Any, list[bool]]:
        xp = backend_of(arrays.gradients[0])
        with phase("encode"):
            work = self._work(self, arrays, step)
        try:
            with phase("encode"):
                if not self.is_whole:
                    self._look(arrays.states[OWNED], work)
                self._encode(work)
            frames = [xp.from_numpy(frame, None) for frame in self._frames]
            replies = yield self.requests[0].carrying(frames)
            if not self.is_whole:
                with phase("add_up"):
                    frame = self._add_up(work, [xp.to_numpy(x) for x in replies])
                replies = yield self.requests[1].carrying([xp.from_numpy(frame, None)])
            with phase("add_up"):
                return self._settle(work, [xp.to_numpy(x) for x in replies])
        except BaseException:  # also of who gives the exchange up
            work.undo()
            raise

    def _look(self, arrays: Sequence[Array], work: CodedStep) -> None:
        """Find what is in shards of others, where somebody else has written since the last step:
        after the number of ranks has changed, say."""
        now = [getattr(x, "_version", None) for x in arrays]
        known, versions = self._looked
        if now == versions and all(map(operator.is_, known, arrays)):
            return
        self.foreign = {}
        if self.memory is None:  # else arrays are new in every step, and others wait for theirs
            self._looked = [*arrays], now
        for i, (owned, own) in enumerate(zip(work.on_host(OWNED), self._own, strict=True)):
            if owned[: own.start].any() or owned[own.stop :].any():
                foreign = owned.copy()
                foreign[own] = 0
                self.foreign[i] = work.from_host(foreign)

    def _encode(self, work: CodedStep) -> None:
        """Write the messages."""
        bad = set[int]()
        for run, code, is_fine in zip(self.runs, self.codes, work.encode(), strict=True):
            if not is_fine:
                code[:] = 0
                bad.add(run.tensor)
        for message, frame in zip(self._messages, self._frames, strict=True):
            flags = message.flags(frame)
            flags[:] = FINE
            flags[[*bad]] = NOT_FINITE  # nobody shall take the rest of such a tensor for the whole
            message.seal(frame)

    def _add_up(self, work: CodedStep, frames: Sequence[np.ndarray]) -> np.ndarray:
        """Return the message of the sums of the rank's own shards."""
        message, reply = self._messages[self.rank], self._replies[self.rank]
        theirs = [message.opened(frame, rank) for rank, frame in enumerate(frames)]
        is_bad = np.any(np.equal(theirs, NOT_FINITE), axis=0).tolist()
        codes = [list(map(operator.itemgetter(message.codes[i]), frames)) for i, _, _ in self.mine]
        flags = reply.flags(self._reply)
        flags[:] = FINE
        with _decoding():
            found = work.add_up(codes, [not is_bad[run.tensor] for run in self.mine])
        for (i, _, _), code, (is_fine, is_left) in zip(self.mine, self.sums, found, strict=True):
            if is_bad[i] or not is_fine:
                code[:] = 0
                flags[i] = NOT_FINITE
            elif not is_left:
                flags[i] = OVERFLOWS
        return reply.seal(self._reply)

    def _settle(self, work: CodedStep, frames: Sequence[np.ndarray]) -> list[bool]:
        """Write averages and states; return of which tensors these are new."""
        if self.is_whole:
            (message,) = self._messages
            flags = np.array([message.opened(x, rank) for rank, x in enumerate(frames)])
            finite = ~np.any(flags == NOT_FINITE, axis=0)
            codes = [
                list(map(operator.itemgetter(message.codes[i]), frames)) for i, _, _ in self.runs
            ]
            known = finite.tolist()
        else:
            pairs = enumerate(zip(self._replies, frames, strict=True))
            flags = np.array([reply.opened(x, rank) for rank, (reply, x) in pairs])
            finite = ~np.any(flags, axis=0)
            codes = [[frames[r][self._replies[r].codes[i]]] for i, _, r in self.runs]
            known = [flags[r, i] != NOT_FINITE for i, _, r in self.runs]
        with _decoding():
            return work.settle(codes, known, finite.tolist())


@contextlib.contextmanager
def _decoding() -> Iterator[None]:
    """Say of codes that mean no numbers where they come from."""
    try:
        yield
    except ValueError as error:
        raise failing("a rank", _CAUSES)(str(error)) from None
