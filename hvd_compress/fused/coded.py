"""Codes of whole buckets: one message and one header for all tensors, and no fresh memory.

A chain of elementwise transforms, such as error feedback, and codes treats a bucket at once.  Its
blocks treat one tensor after the other, with the same bits; tests hold the two equal.
Shards are those that each tensor has by itself.  One plan serves whole tensors and shards
(:mod:`hvd_compress.fused.coded_plan`), and the memory that arrays are in decides who does its work.

In host memory the loops of :mod:`hvd_compress.kernels.codecs` do it.  If error feedback is the only
transform, residuals become the new ones in the pass that codes them.  The old ones are kept where
the results will be until all ranks' values are known to be finite.  Otherwise the gradient and this
rank's own codes are kept, and states are written then.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any, ClassVar

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, Spec
from hvd_compress.codecs import Codec
from hvd_compress.fused.coded_plan import (
    FINE,
    NOT_FINITE,
    OVERFLOWS,
    OWNED,
    CodedOnDevice,
    CodedPlan,
    Run,
    decoding,
)
from hvd_compress.fused.in_place import Arrays, Views, is_on_host, overlap, room
from hvd_compress.fused.stages import Sent, StagedForm
from hvd_compress.kernels import loops_of, threads
from hvd_compress.requests import Alltoall, Gather, Request
from hvd_compress.times import begin_phase


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
        loops, n = loops_of(x), backend_of(x).size(x)
        if loops is None:
            return False
        taken: bool = loops.Codes.takes(self.codec, n, self.is_whole)
        return taken

    def plan(self, specs: Sequence[Spec], key: Hashable, step: Context) -> CodedPlan:
        plan = CodedOnHost if is_on_host(specs[0].x) else CodedOnDevice
        return plan(self, specs, key, step, self.codec, self.is_whole)


class FusedAlltoall(FusedCodes):
    """Every rank adds up one shard of each tensor, and codes what comes out."""

    is_whole = False


class FusedAllgather(FusedCodes):
    """Every rank gets the codes of all, and adds them up in the order of the ranks."""

    is_whole = True


class CodedOnHost(CodedPlan):
    """The plan of a bucket in host memory.

    Attributes:
        bound: the codecs' functions.
        longest: the elements of the longest run.
        codes: the place of each run's codes in what is sent.
        sums: the place in what is sent of what each of the rank's own runs adds up to.
        left: memory for what these codes leave out.
    """

    def __init__(
        self, form: Any, specs: Sequence[Spec], key: Hashable, step: Context, *which: Any
    ) -> None:
        super().__init__(form, specs, key, step, *which)
        self.bound = [codec.bound() for codec in self.codecs]
        self.longest = max(run.size for run in self.runs)
        self._frames = [np.zeros(message.size, np.uint8) for message in self.messages]
        self.codes = [self._frames[r][self.messages[r].codes[i]] for i, _, r in self.runs]
        if self.is_whole:
            self.requests = [Gather(self._frames[0], equal_sizes=True)]
            return
        reply = self.replies[self.rank]
        self._reply = np.zeros(reply.size, np.uint8)
        self.sums = [self._reply[reply.codes[run.tensor]] for run in self.mine]
        self.left = [np.empty(run.size, np.float32) for run in self.mine]
        self.requests = [Alltoall(self._frames), Gather(self._reply, self.equal_sizes)]

    def meet(self, arrays: Arrays, step: Context) -> Generator[Request, Any, list[bool]]:
        begin_phase("encode")
        work = StepOnHost(self, arrays, step)
        try:
            if not self.is_whole:
                self.look(arrays.states[OWNED])
            self._encode(work)
            replies = yield self.requests[0]
            if not self.is_whole:
                begin_phase("add_up")
                self._add_up(work, replies)
                replies = yield self.requests[1]
            begin_phase("add_up")
            return self._settle(work, replies)
        except BaseException:  # also of who gives the exchange up
            work.undo()
            raise

    def _encode(self, work: StepOnHost) -> None:
        bad = set[int]()
        for run, code, is_fine in zip(self.runs, self.codes, work.encode(), strict=True):
            if not is_fine:
                code[:] = 0
                bad.add(run.tensor)
        for message, frame in zip(self.messages, self._frames, strict=True):
            flags = message.flags(frame)
            flags[:] = FINE
            flags[[*bad]] = NOT_FINITE  # nobody shall take the rest of such a tensor for the whole
            message.seal(frame)

    def _add_up(self, work: StepOnHost, frames: Sequence[np.ndarray]) -> None:
        """Write the message of the sums of the rank's own shards."""
        message, reply = self.messages[self.rank], self.replies[self.rank]
        theirs = [message.opened(frame, rank) for rank, frame in enumerate(frames)]
        is_bad = np.any(np.equal(theirs, NOT_FINITE), axis=0).tolist()
        codes = [list(map(operator.itemgetter(message.codes[i]), frames)) for i, _, _ in self.mine]
        flags = reply.flags(self._reply)
        flags[:] = FINE
        with decoding():
            found = work.add_up(codes, [not is_bad[run.tensor] for run in self.mine])
        for (i, _, _), code, (is_fine, is_left) in zip(self.mine, self.sums, found, strict=True):
            if is_bad[i] or not is_fine:
                code[:] = 0
                flags[i] = NOT_FINITE
            elif not is_left:
                flags[i] = OVERFLOWS
        reply.seal(self._reply)

    def _settle(self, work: StepOnHost, frames: Sequence[np.ndarray]) -> list[bool]:
        """Write averages and states; return of which tensors these are new."""
        if self.is_whole:
            (message,) = self.messages
            flags = np.array([message.opened(x, rank) for rank, x in enumerate(frames)])
            finite = ~np.any(flags == NOT_FINITE, axis=0)
            codes = [
                list(map(operator.itemgetter(message.codes[i]), frames)) for i, _, _ in self.runs
            ]
            known = finite.tolist()
        else:
            pairs = enumerate(zip(self.replies, frames, strict=True))
            flags = np.array([reply.opened(x, rank) for rank, (reply, x) in pairs])
            finite = ~np.any(flags, axis=0)
            codes = [[frames[r][self.replies[r].codes[i]]] for i, _, r in self.runs]
            known = [flags[r, i] != NOT_FINITE for i, _, r in self.runs]
        with decoding():
            return work.settle(codes, known, finite.tolist())


class StepOnHost:
    """The numbers of a bucket in one step, as of :meth:`CodedOnHost.meet`."""

    def __init__(self, plan: CodedOnHost, arrays: Arrays, step: Context) -> None:
        self.plan, self.arrays, self.step = plan, arrays, step
        self.stages = plan.form.stages
        #: where old residuals are, if the new ones are in their places already, and of which runs
        #: of each tensor they are: most often in the place of the gradients
        self._kept: list[np.ndarray] | None = None
        self._fed: dict[int, list[slice]] = {}

    def encode(self) -> list[bool]:
        """Write the codes of all runs; return which are finite.  The codes of others mean
        nothing."""
        plan, views, n = self.plan, self.arrays.views, threads()
        if self.stages.only_feeds_back and not plan.foreign:
            kept = views.out
            if overlap(self.arrays.columns[1]):  # what is kept of one would be another's gradient
                kept = [np.empty_like(x) for x in kept]
            self._kept, (key,) = kept, self.stages.keys
        fine = []
        with np.errstate(over="ignore", invalid="ignore"):
            each = zip(plan.runs, plan.codes, plan.randoms(plan.runs, self.step), strict=True)
            for (i, own, _), code, random in each:
                if self._kept is None:
                    its = self.arrays.context(self.step, i)
                    x = plan.passed_on(views, i, own, its, plan.longest)
                    if i in plan.foreign:
                        x = x + plan.foreign[i][own]
                    is_fine = plan.codecs[i].put(x, random, code)
                else:
                    left, feed = views.states[key][i][own], plan.bound[i].feed
                    x, old = views.x[i][own], self._kept[i][own]
                    is_fine, _ = feed(left, x, old, [], random, left, code, n)
                    self._fed.setdefault(i, []).append(own)
                fine.append(is_fine)
        return fine

    def add_up(
        self, codes: Sequence[Sequence[np.ndarray]], known: Sequence[bool]
    ) -> list[tuple[bool, bool]]:
        """Write the codes of what the rank's own shards add up to; return which sums are finite,
        and what is left of them.

        Args:
            codes: of each shard, those of all ranks.
            known: whether all of them mean numbers; of others nothing has to be done.
        """
        plan, views, n, found = self.plan, self.arrays.views, threads(), []
        randoms, sums = plan.randoms(plan.mine, self.step, 1), (plan.left, plan.sums)
        rows = zip(plan.mine, codes, known, self._owned(views), randoms, *sums, strict=True)
        with np.errstate(over="ignore", invalid="ignore"):
            for (i, _, _), theirs, is_known, base, random, left, code in rows:
                its = False, False
                if is_known:
                    feed = plan.bound[i].feed
                    its = feed(base, None, None, theirs, random, left, code, n)
                found.append(its)
        return found

    def _owned(self, views: Views) -> list[np.ndarray]:
        """Return the rank's own shards of what owners have left out, views."""
        return [views.states[OWNED][i][own] for i, own, _ in self.plan.mine]

    def settle(
        self, codes: Sequence[Sequence[np.ndarray]], known: Sequence[bool], finite: list[bool]
    ) -> list[bool]:
        """Write averages, and states of tensors that are finite; return which are.

        Args:
            codes: of each run, that of its sum, or those of all ranks.
            known: whether these mean numbers.
            finite: whether all of a tensor do; of sums of whole tensors it is found out here.
        """
        plan, views, n, by = self.plan, self.arrays.views, threads(), np.float32(self.plan.size)
        is_fed = self._kept is not None
        settles = not is_fed and bool(self.stages.transforms)
        # States, and what is kept of them where the result will be, wait for the sum of all ranks.
        is_late = plan.is_whole and (is_fed or settles)
        totals = room(plan.longest)[0] if is_late else views.out[0]
        if not plan.is_whole:
            for i in [i for i in self._fed if not finite[i]]:
                self._put_back(i)
            self._fed.clear()
        rows = zip(plan.runs, plan.codes, codes, known, strict=True)
        with np.errstate(over="ignore", invalid="ignore"):
            for run, code, theirs, is_known in rows:
                (i, own, _), mean = run, plan.bound[run.tensor].mean
                out = views.out[i][own]
                write: Callable[[np.ndarray], Any]
                if settles and not plan.is_whole:
                    write = functools.partial(_write, mean, theirs, is_known, plan.size, n)
                else:
                    total = totals[: out.size] if is_late else out
                    if is_known:
                        fine = mean(theirs, 1 if is_late else plan.size, total, plan.is_whole, n)
                    else:
                        fine = False
                        total.fill(np.nan)
                    finite[i] = fine if plan.is_whole else finite[i]
                    write = functools.partial(np.divide, total, by)
                if settles:
                    sent = self._sent(run, code) if finite[i] else None
                    plan.settle(views, i, own, self.arrays.context(self.step, i), sent, write)
                elif is_late:
                    if not finite[i]:
                        self._put_back(i)
                    self._fed.pop(i, None)
                    write(out)
        if plan.is_whole:
            return finite
        for i in [i for i in plan.foreign if finite[i]]:
            del plan.foreign[i]
            views.states[OWNED][i].fill(0)
        of_mine = zip(plan.mine, self._owned(views), plan.left, strict=True)
        for run, owned, left in of_mine:
            if finite[run.tensor]:
                owned[:] = left
        return finite

    def _sent(self, run: Run, code: np.ndarray) -> Sent:
        """Return what was sent of a run, as this code."""
        plan, (i, own, _) = self.plan, run
        codec = plan.codecs[i]
        if i not in plan.foreign and self.stages.only_feeds_back:
            return functools.partial(codec.take_off, code)
        sent = room(plan.longest)[1, : run.size]
        codec.decode_to(code, sent)
        if i in plan.foreign:
            sent -= plan.foreign[i][own]
        return sent

    def _put_back(self, tensor: int) -> None:
        assert self._kept is not None
        (key,) = self.stages.keys
        for own in self._fed.pop(tensor):
            np.copyto(self.arrays.views.states[key][tensor][own], self._kept[tensor][own])

    def undo(self) -> None:
        """Give tensors that are not settled the states that they had."""
        for tensor in list(self._fed):
            self._put_back(tensor)


def _write(mean: Any, codes: Any, is_known: bool, by: int, n: int, out: np.ndarray) -> None:
    """Write what the code of a shard means, divided by a number, if it means any."""
    if is_known:
        mean(codes, by, out, False, n)
    else:
        out.fill(np.nan)
