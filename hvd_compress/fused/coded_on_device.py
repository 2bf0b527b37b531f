"""Codes of whole buckets in a device's memory: the exchanges of :mod:`hvd_compress.fused.coded`,
with the same messages and the same bits.

All tensors of a bucket are copied end to end, and the device's ``Codes`` take them at once: what
its kernels need to be told is the same in every step.  Codes come to the host, and go into the
message there.  The host waits for the device twice: for codes, and for what it has to know of what
was added up; and once more where somebody else has written an owner's residuals.  States and
results are written at the end, where all ranks' values are finite.
"""

from __future__ import annotations

import abc
from collections.abc import Generator, Hashable, Sequence
from typing import Any, Protocol

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, Spec
from hvd_compress.codecs import Codec
from hvd_compress.fused.code_messages import (
    FINE,
    NOT_FINITE,
    OVERFLOWS,
    Division,
    message_of_all,
    random_of,
)
from hvd_compress.fused.in_place import Arrays
from hvd_compress.fused.stages import StagedForm, StagedPlan
from hvd_compress.kernels import loops_of
from hvd_compress.requests import Alltoall, Gather, Request
from hvd_compress.times import phase

_R, _O = "residual", "owner_residual"


class Made(Protocol):
    """Codes that were made, still in a device's memory."""

    def decode(self, out: Array) -> None:
        """Write what they decode to, each run where its elements are."""

    def take_off(self, out: Array) -> None:
        """Subtract it."""

    def look(self, left: Array) -> None:
        """Note whether what is left, the elements of the runs, is finite."""

    def arrived(self) -> tuple[list[np.ndarray], np.ndarray]:
        """Wait for them; return the codes of each run in host memory, and of each run whether it
        was not finite, a number, and whether what is left is not finite."""


class Codes(Protocol):
    """The codes of runs of elements of a flat array in a device's memory, all at once: what the
    module of its loops has under this name.  Codecs differ in the length of their runs at most."""

    def __init__(self, codecs: Sequence[Codec], spans: Sequence[slice], like: Array) -> None: ...

    @staticmethod
    def takes(codec: Codec, n: int, once: bool = True) -> bool:
        """Return whether there are codes of ``n`` elements, or with ``once=False`` of several runs
        for which one generator draws."""

    def encode(self, x: Array, randoms: Sequence[np.random.Generator | None]) -> Made:
        """Return the codes of ``x``, given the generator of each run."""

    def decode(self, codes: Sequence[np.ndarray], out: Array, add: bool = False) -> None:
        """Write what codes that arrived decode to, or add it."""

    def finite(self, x: Array) -> np.ndarray:
        """Return which runs of ``x`` are finite; the host waits for it."""


class _OnDevice(StagedPlan, abc.ABC):
    """The plan of a bucket that both kinds of exchanges keep."""

    form: Any  # FusedCodes

    def __init__(
        self, form: StagedForm, specs: Sequence[Spec], key: Hashable, step: Context
    ) -> None:
        super().__init__(form, specs, key, step)
        self.codecs = [self.form.codec.for_shape(shape) for shape in self.shapes]
        self._loops = loops_of(specs[0].x)
        ends = np.cumsum(self.sizes).tolist()
        #: of each tensor, where it is
        self.spans = [slice(end - n, end) for end, n in zip(ends, self.sizes, strict=True)]

    def codes(self, tensors: Sequence[int], spans: Sequence[slice], like: Array) -> Codes:
        """Return those of runs of some tensors."""
        codes: Codes = self._loops.Codes([self.codecs[i] for i in tensors], spans, like)
        return codes

    def random(self, tensor: int, step: Context, turn: int = 0) -> np.random.Generator | None:
        """Return the random numbers of a tensor in a step, if its codec takes any."""
        return random_of(self.codecs[tensor], self.names[tensor], step, turn)

    def passed_on_of_all(self, arrays: Arrays) -> Array:
        """Return what is coded, the sums of gradients and residuals, as one new array."""
        x = joined(arrays.gradients)
        if self.form.stages.transforms:
            x = backend_of(x).add_scaled(x, joined(arrays.states[_R]), 1.0)
        return x

    def settle_all(
        self, arrays: Arrays, total: Array, left: Array | None, finite: Sequence[bool]
    ) -> None:
        """Write the averages of ``total``, and where a tensor is finite what is ``left`` of it."""
        xp, (_, out, *_) = backend_of(total), arrays.columns()
        mean = xp.divided(total, self.size)  # the last memory that is asked for
        if left is not None:
            self.write(arrays.states[_R], left, self.spans, finite)
        xp.write_into(out.arrays, mean)

    def write(
        self, to: Sequence[Array], x: Array, spans: Sequence[slice], fine: Sequence[bool]
    ) -> None:
        """Write runs of ``x``, which they are end to end, into arrays, where that is fine."""
        xp = backend_of(x)
        if all(fine):
            xp.write_into(to, x)
            return
        for array, own, is_fine in zip(to, spans, fine, strict=True):
            if is_fine:
                xp.write_into([array], x[own])


def joined(arrays: Sequence[Array]) -> Array:
    """Return arrays end to end, in new memory."""
    xp = backend_of(arrays[0])
    x = xp.end_to_end(arrays)
    return xp.copy(x) if len(arrays) == 1 else x


class WholeOnDevice(_OnDevice):
    """The plan of a bucket whose codes go to all ranks."""

    def __init__(
        self, form: StagedForm, specs: Sequence[Spec], key: Hashable, step: Context
    ) -> None:
        super().__init__(form, specs, key, step)
        self._message = message_of_all(self.codecs, self.sizes, form.stages.feeds_back)
        self._frame = np.zeros(self._message.size, np.uint8)
        self._codes = self.codes(range(len(self.sizes)), self.spans, specs[0].x)

    def meet(self, arrays: Arrays, step: Context) -> Generator[Request, Any, Sequence[bool]]:
        xp = backend_of(arrays.gradients[0])
        with phase("encode"):
            x = self.passed_on_of_all(arrays)
            randoms = [self.random(i, step) for i in range(len(self.sizes))]
            made = self._codes.encode(x, randoms)
            frame = self._sealed(made)
        replies = yield Gather(xp.from_numpy(frame, None), equal_sizes=True)
        with phase("add_up"):
            return self._finish(arrays, x, made, [xp.to_numpy(own) for own in replies])

    def _sealed(self, made: Made) -> np.ndarray:
        codes, notes = made.arrived()
        frame, flags = self._frame, self._message.flags(self._frame)
        flags[:] = np.where(notes[:, 0], NOT_FINITE, FINE)
        for part, code, flag in zip(self._message.parts, codes, flags.tolist(), strict=True):
            frame[part.codes] = 0 if flag else code
        return self._message.seal(frame)

    def _finish(
        self, arrays: Arrays, x: Array, made: Made, frames: Sequence[np.ndarray]
    ) -> Sequence[bool]:
        xp, parts = backend_of(x), self._message.parts
        flags = [self._message.opened(frame, rank) for rank, frame in enumerate(frames)]
        known = ~np.any(np.equal(flags, NOT_FINITE), axis=0)
        total = xp.full_like(x, 0.0)
        for frame in frames:
            self._codes.decode([frame[part.codes] for part in parts], total, add=True)
        for i in np.flatnonzero(~known):
            total[self.spans[i]] = np.nan
        finite = self._codes.finite(total)
        left = None
        if self.form.stages.transforms:
            made.take_off(x)
            left = x
        found: list[bool] = finite.tolist()
        self.settle_all(arrays, total, left, found)
        return found


class ShardedOnDevice(_OnDevice):
    """The plan of a bucket of whose tensors every rank adds up a shard."""

    def __init__(
        self, form: StagedForm, specs: Sequence[Spec], key: Hashable, step: Context
    ) -> None:
        super().__init__(form, specs, key, step)
        self.keys = (*self.keys, _O)
        self._division = Division(self.codecs, self.sizes, self.size)
        #: tensors and owners of all shards, and where they are
        self._pairs = [(i, r) for i, own in enumerate(self._division.owners) for r in own]
        shards, like = self._division.shards, specs[0].x
        self._spans = [_behind(self.spans[i].start, shards[i][r]) for i, r in self._pairs]
        self._codes = self.codes([i for i, _ in self._pairs], self._spans, like)
        #: the tensors of which this rank has a shard, the shards, and these end to end
        self._mine = [i for i, r in self._pairs if r == self.rank]
        self._own = [shards[i][self.rank] for i in self._mine]
        ends = np.cumsum([own.stop - own.start for own in self._own]).tolist()
        spans = [_behind(end - own.stop, own) for end, own in zip(ends, self._own, strict=True)]
        self._own_spans = spans
        self._own_codes = self.codes(self._mine, spans, like) if self._mine else None
        self._frames = [np.zeros(message.size, np.uint8) for message in self._division.messages]
        self._reply = np.zeros(self._division.replies[self.rank].size, np.uint8)
        #: what owned others' shards when it was last looked through, and how often it was written
        self._looked: list[tuple[Array, Any]] = []
        #: what is in residuals of shards that were this rank's, by tensor
        self._foreign: dict[int, Array] = {}

    def meet(self, arrays: Arrays, step: Context) -> Generator[Request, Any, Sequence[bool]]:
        xp = backend_of(arrays.gradients[0])
        with phase("encode"):
            x = base = self.passed_on_of_all(arrays)
            self._look(arrays)
            if self._foreign:
                x = xp.copy(base)
                for i, foreign in self._foreign.items():
                    xp.add_scaled(x[self.spans[i]], foreign, 1.0)
            randoms = [self.random(i, step) for i in range(len(self.sizes))]
            made = self._codes.encode(x, [randoms[i] for i, _ in self._pairs])
            frames = self._sealed(made)
        received = yield Alltoall([xp.from_numpy(frame, None) for frame in frames])
        with phase("add_up"):
            left, frame = self._add_up(arrays, [xp.to_numpy(own) for own in received], step)
        replies = yield Gather(xp.from_numpy(frame, None), self._division.has_equal_replies)
        with phase("add_up"):
            return self._finish(arrays, base, made, left, [xp.to_numpy(own) for own in replies])

    def _look(self, arrays: Arrays) -> None:
        """Find what is in shards of others, where somebody else has written since the last step:
        after the number of ranks has changed, say."""
        owned = arrays.states[_O]
        known, now = self._looked, _versions(owned)
        if len(known) == len(now) and all(
            a is b and before == after for (a, before), (b, after) in zip(known, now, strict=True)
        ):
            return
        xp = backend_of(owned[0])
        on_host, self._foreign = np.array(xp.to_numpy(joined(owned))), {}
        for i, span in enumerate(self.spans):
            found = on_host[span]
            found[self._division.shards[i][self.rank]] = 0
            if found.any():
                self._foreign[i] = xp.from_numpy(found, owned[i])
        self._looked = now

    def _sealed(self, made: Made) -> list[np.ndarray]:
        """Return a message for each rank."""
        codes, notes = made.arrived()
        messages, bad = self._division.messages, np.zeros(len(self.sizes), bool)
        for (i, rank), code, is_bad in zip(self._pairs, codes, notes[:, 0].tolist(), strict=True):
            self._frames[rank][messages[rank].parts[i].codes] = 0 if is_bad else code
            bad[i] |= bool(is_bad)
        for message, frame in zip(messages, self._frames, strict=True):
            # Nobody shall take the rest of it for the whole.
            message.flags(frame)[:] = np.where(bad, NOT_FINITE, FINE)
            message.seal(frame)
        return self._frames

    def _add_up(
        self, arrays: Arrays, frames: Sequence[np.ndarray], step: Context
    ) -> tuple[Array, np.ndarray]:
        """Return what is left of the sums of the rank's own shards, and the message with these."""
        message, reply = (
            each[self.rank] for each in (self._division.messages, self._division.replies)
        )
        theirs = [message.opened(frame, rank) for rank, frame in enumerate(frames)]
        arrays.columns()  # which have the memory of before
        flags = reply.flags(self._reply)
        flags[:] = np.where(np.any(np.equal(theirs, NOT_FINITE), axis=0), NOT_FINITE, FINE)
        if self._own_codes is None:
            flags[:] = FINE
            return None, reply.seal(self._reply)
        left = joined(self._shards_of(arrays))
        for frame in frames:
            codes = [frame[message.parts[i].codes] for i in self._mine]
            self._own_codes.decode(codes, left, add=True)
        made = self._own_codes.encode(left, [self.random(i, step, 1) for i in self._mine])
        made.take_off(left)
        made.look(left)
        found, notes = made.arrived()
        for i, code, (is_bad, _, overflows) in zip(self._mine, found, notes.tolist(), strict=True):
            if is_bad:
                flags[i] = NOT_FINITE
            elif overflows and flags[i] == FINE:
                flags[i] = OVERFLOWS
            self._reply[reply.parts[i].codes] = 0 if flags[i] == NOT_FINITE else code
        others = np.ones(len(flags), bool)
        others[self._mine] = False
        flags[others] = FINE
        return left, reply.seal(self._reply)

    def _shards_of(self, arrays: Arrays) -> list[Array]:
        """Return the rank's own shards of what owners have left out, views."""
        owned = arrays.states[_O]
        flat = [backend_of(owned[i]).reshape(owned[i], (-1,)) for i in self._mine]
        return [x[own] for x, own in zip(flat, self._own, strict=True)]

    def _finish(
        self,
        arrays: Arrays,
        base: Array,
        made: Made,
        left: Array,
        frames: Sequence[np.ndarray],
    ) -> Sequence[bool]:
        xp, replies = backend_of(base), self._division.replies
        pairs = zip(replies, frames, strict=True)
        flags = [reply.opened(frame, rank) for rank, (reply, frame) in enumerate(pairs)]
        finite = [bool(fine) for fine in ~np.any(flags, axis=0)]
        total = xp.full_like(base, 0.0)
        self._codes.decode([frames[r][replies[r].parts[i].codes] for i, r in self._pairs], total)
        for (i, rank), span in zip(self._pairs, self._spans, strict=True):
            if flags[rank][i] == NOT_FINITE:
                total[span] = np.nan
        residual = self._residual(base, made)
        gone = [i for i in self._foreign if finite[i]]
        zeros = [xp.full_like(total[self.spans[i]], 0.0) for i in gone]
        self.settle_all(arrays, total, residual, finite)
        fine = [finite[i] for i in self._mine]
        for i, zero in zip(gone, zeros, strict=True):
            xp.write_into([arrays.states[_O][i]], zero)
            del self._foreign[i]
        if fine:
            self.write(self._shards_of(arrays), left, self._own_spans, fine)
        self._looked = _versions(arrays.states[_O])
        return finite

    def _residual(self, base: Array, made: Made) -> Array | None:
        """Return what is left of what this rank has coded, in the place of ``base``."""
        if not self.form.stages.transforms:
            return None
        if not self._foreign:
            made.take_off(base)
            return base
        xp = backend_of(base)
        sent = xp.full_like(base, 0.0)
        made.decode(sent)
        for i, foreign in self._foreign.items():
            xp.add_scaled(sent[self.spans[i]], foreign, -1.0)
        return xp.add_scaled(base, sent, -1.0)


def _behind(start: int, own: slice) -> slice:
    return slice(start + own.start, start + own.stop)


def _versions(arrays: Sequence[Array]) -> list[tuple[Array, Any]]:
    return [(x, getattr(x, "_version", None)) for x in arrays]
