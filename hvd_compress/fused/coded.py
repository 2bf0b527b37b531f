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
from typing import Any, ClassVar, TypeAlias

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, Place, Spec
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
from hvd_compress.fused.in_place import Arrays, is_on_host, overlap, two_rows
from hvd_compress.fused.stages import Sent, StagedForm
from hvd_compress.kernels import loops_of, threads
from hvd_compress.requests import Alltoall, Gather, Request
from hvd_compress.times import begin_phase

#: residuals of tensors whose new ones are in their places already, and where the old ones are:
#: most often in the place of the gradients
Fed: TypeAlias = dict[int, list[tuple[np.ndarray, np.ndarray]]]


@dataclasses.dataclass(frozen=True, eq=False)
class FusedCodes(StagedForm):
    """A form for whole buckets; see :class:`hvd_compress.fused.in_place.InPlaceForm`.

    Attributes:
        codec: of all values.
        is_whole: every rank gets the codes of all tensors, and adds them up in the order of the
            ranks.  Otherwise it adds up one shard of each, and codes what comes out.
    """

    takes_halves: ClassVar[bool] = True

    codec: Codec
    is_whole: bool

    def place(self, gradient: Array, context: Context) -> Place | None:
        """Take half precisions on a device, those of a dtype together."""
        dtype = backend_of(gradient).dtype(gradient)
        is_wide = dtype == "float32"
        if not is_wide and (self.stages.finishes or is_on_host(gradient)):
            return None
        place = super().place(gradient, context)
        if place is None or is_wide:
            return place
        if is_on_host(place.x):
            return None
        return place._replace(key=(place.key, dtype), kind="joint work on GPUs")

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
        return plan(self, specs, key, step)


class CodedOnHost(CodedPlan):
    """The plan of a bucket in host memory.

    Attributes:
        bound: the codecs' functions.
        longest: the elements of the longest run.
        codes: the place of each run's codes in what is sent.
        sums: the place in what is sent of what each of the rank's own runs adds up to.
        left: memory for what these codes leave out.
    """

    def __init__(self, form: Any, specs: Sequence[Spec], key: Hashable, step: Context) -> None:
        super().__init__(form, specs, key, step)
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
        fed: Fed = {}
        try:
            if not self.is_whole:
                self.look(arrays.states[OWNED])
            self._encode(arrays, step, fed)
            replies = yield self.requests[0]
            if not self.is_whole:
                begin_phase("add_up")
                self._add_up(arrays, step, replies)
                replies = yield self.requests[1]
            begin_phase("add_up")
            with decoding():
                return self._settle(arrays, step, fed, *self._arrived(replies))
        finally:  # of an exchange that fails or is given up, whose tensors are not settled
            _put_back(fed, [*fed])

    @property
    def _feeds(self) -> bool:
        """Whether residuals become the new ones in the pass that codes them."""
        return self.form.stages.only_feeds_back and not self.foreign

    def _encode(self, arrays: Arrays, step: Context, fed: Fed) -> None:
        views, n, feeds, bad = arrays.views, threads(), self._feeds, set[int]()
        kept = views.out
        if feeds and overlap(arrays.columns[1]):  # what is kept of one would be another's gradient
            kept = [np.empty_like(x) for x in kept]
        with np.errstate(over="ignore", invalid="ignore"):
            each = zip(self.runs, self.codes, self.randoms(self.runs, step), strict=True)
            for (i, own, _), code, random in each:
                if not feeds:
                    x = self.passed_on(views, i, own, arrays.context(step, i), self.longest)
                    if i in self.foreign:
                        x = x + self.foreign[i][own]
                    is_fine = self.codecs[i].put(x, random, code)
                else:
                    left, old = views.states["residual"][i][own], kept[i][own]
                    x, feed = views.x[i][own], self.bound[i].feed
                    is_fine, _ = feed(left, x, old, [], random, left, code, n)
                    fed.setdefault(i, []).append((left, old))
                if not is_fine:
                    code[:] = 0
                    bad.add(i)
        for message, frame in zip(self.messages, self._frames, strict=True):
            flags = message.flags(frame)
            flags[:] = FINE
            flags[[*bad]] = NOT_FINITE  # nobody shall take the rest of such a tensor for the whole
            message.seal(frame)

    def _add_up(self, arrays: Arrays, step: Context, frames: Sequence[np.ndarray]) -> None:
        """Write the message of the sums of the rank's own shards."""
        message, reply = self.messages[self.rank], self.replies[self.rank]
        theirs = [message.opened(frame, rank) for rank, frame in enumerate(frames)]
        is_bad = np.any(np.equal(theirs, NOT_FINITE), axis=0).tolist()
        flags, n = reply.flags(self._reply), threads()
        flags[:] = FINE
        randoms, sums = self.randoms(self.mine, step, 1), (self.left, self.sums)
        rows = zip(self.mine, self._owned(arrays), randoms, *sums, strict=True)
        with decoding(), np.errstate(over="ignore", invalid="ignore"):
            for (i, _, _), base, random, left, code in rows:
                is_fine = is_left = False
                if not is_bad[i]:
                    codes = list(map(operator.itemgetter(message.codes[i]), frames))
                    feed = self.bound[i].feed
                    is_fine, is_left = feed(base, None, None, codes, random, left, code, n)
                if not is_fine:
                    code[:] = 0
                    flags[i] = NOT_FINITE
                elif not is_left:
                    flags[i] = OVERFLOWS
        reply.seal(self._reply)

    def _owned(self, arrays: Arrays) -> list[np.ndarray]:
        """Return the rank's own shards of what owners have left out, views."""
        return [arrays.views.states[OWNED][i][own] for i, own, _ in self.mine]

    def _arrived(
        self, frames: Sequence[np.ndarray]
    ) -> tuple[list[list[np.ndarray]], list[bool], list[bool]]:
        """Return the code of each run's sum, or those of all ranks; and whether these mean numbers.
        The third list says of each tensor whether all its codes do."""
        layouts = self.messages * self.size if self.is_whole else self.replies
        pairs = enumerate(zip(layouts, frames, strict=True))
        flags = np.array([layout.opened(x, rank) for rank, (layout, x) in pairs])
        if not self.is_whole:
            codes = [[frames[r][self.replies[r].codes[i]]] for i, _, r in self.runs]
            known = [flags[r, i] != NOT_FINITE for i, _, r in self.runs]
            return codes, known, (~np.any(flags, axis=0)).tolist()
        finite = (~np.any(flags == NOT_FINITE, axis=0)).tolist()
        places = [operator.itemgetter(layouts[0].codes[i]) for i, _, _ in self.runs]
        return [list(map(place, frames)) for place in places], finite, [*finite]

    def _settle(
        self,
        arrays: Arrays,
        step: Context,
        fed: Fed,
        codes: Sequence[Sequence[np.ndarray]],
        known: Sequence[bool],
        finite: list[bool],
    ) -> list[bool]:
        """Write averages, and states of tensors that are finite; return which are.  The last three
        are those of :meth:`_arrived`; of sums of whole tensors it is found out here."""
        views, n, by, is_whole = arrays.views, threads(), np.float32(self.size), self.is_whole
        settles = not self._feeds and bool(self.form.stages.transforms)
        # States, and what is kept of them where the result will be, wait for the sum of all ranks.
        is_late = is_whole and bool(self.form.stages.transforms)
        totals = two_rows(self.longest)[0] if is_late else views.out[0]
        if not is_whole:
            _put_back(fed, [i for i in fed if not finite[i]])
            fed.clear()
        rows = zip(self.runs, self.codes, codes, known, strict=True)
        with np.errstate(over="ignore", invalid="ignore"):
            for run, code, theirs, is_known in rows:
                (i, own, _), mean = run, self.bound[run.tensor].mean
                out = views.out[i][own]
                write: Callable[[np.ndarray], Any]
                if settles and not is_whole:
                    write = functools.partial(_write, mean, theirs, is_known, self.size, n)
                else:
                    total = totals[: out.size] if is_late else out
                    if is_known:
                        fine = mean(theirs, 1 if is_late else self.size, total, is_whole, n)
                    else:
                        fine = False
                        total.fill(np.nan)
                    finite[i] = fine if is_whole else finite[i]
                    write = functools.partial(np.divide, total, by)
                if settles:
                    sent = self._sent(run, code) if finite[i] else None
                    self.settle(views, i, own, arrays.context(step, i), sent, write)
                elif is_late:
                    if not finite[i]:
                        _put_back(fed, [i])
                    fed.pop(i, None)
                    write(out)
        for i in [i for i in self.foreign if finite[i]]:
            del self.foreign[i]
            views.states[OWNED][i].fill(0)
        if not is_whole:
            for run, owned, left in zip(self.mine, self._owned(arrays), self.left, strict=True):
                if finite[run.tensor]:
                    owned[:] = left
        return finite

    def _sent(self, run: Run, code: np.ndarray) -> Sent:
        """Return what was sent of a run, as this code."""
        i, own, _ = run
        if i not in self.foreign and self.form.stages.only_feeds_back:
            return functools.partial(self.codecs[i].take_off, code)
        sent = two_rows(self.longest)[1, : run.size]
        self.codecs[i].decode_to(code, sent)
        if i in self.foreign:
            sent -= self.foreign[i][own]
        return sent


def _put_back(fed: Fed, tensors: Sequence[int]) -> None:
    for tensor in tensors:
        for residual, old in fed.pop(tensor):
            np.copyto(residual, old)


def _write(mean: Any, codes: Any, is_known: bool, by: int, n: int, out: np.ndarray) -> None:
    """Write what the code of a shard means, divided by a number, if it means any."""
    if is_known:
        mean(codes, by, out, False, n)
    else:
        out.fill(np.nan)
