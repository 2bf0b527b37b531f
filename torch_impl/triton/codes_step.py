"""The codes of a bucket in a GPU's memory, from gradients to averages, in Triton, with the bits of
the host.

All tensors of a bucket are copied end to end, and kernels take them at once: what they have to be
told is the same in every step.  Codes are written where they are sent from.  What is not finite is
found out on the GPU, and decides there what is sent and written: the host waits for nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hvd_compress.kernels import Column
from hvd_compress.wire.header import START

from ..backend import add_scaled, copy, end_to_end, from_numpy, to_numpy
from . import codec_kernels as kernels
from .codecs import Codes, Made
from .tasks import WIDTH, Layout

_EXACT = {"enable_fp_fusion": False}


class CodesStep:
    """The steps of a bucket.

    Args:
        plan: a :class:`hvd_compress.fused.coded_plan.CodedPlan`, which says what is coded.
        feeds_back: whether residuals are added to gradients.
        like: a tensor on the GPU.

    Attributes:
        frames: what is sent first: a message to each rank, or to all.
        reply: what is sent of the sums of this rank's own shards.
    """

    def __init__(self, plan: Any, feeds_back: bool, like: torch.Tensor) -> None:
        self._plan, self._feeds_back, self._device = plan, feeds_back, like.device
        self._tensors = _end_to_end(plan.sizes)
        spans = [_inside(self._tensors[run.tensor], run.own) for run in plan.runs]
        sent = _starts(plan.messages)
        arriving = _starts([*plan.messages] * plan.size if plan.is_whole else plan.replies)
        self._codes = self._codes_at(plan.runs, spans, plan.messages, sent, like)
        #: of what arrives at the end, of whole tensors that of the first rank
        self._results = self._codes_at(plan.runs, spans, plan.replies, arriving, like)
        self._own: Codes | None = None
        if plan.mine:
            spans = _end_to_end([run.size for run in plan.mine])
            in_one = dict.fromkeys(range(plan.size), 0)
            self._own = self._codes_at(plan.mine, spans, plan.messages, in_one, like)
        self._whole = torch.zeros(sent[-1], dtype=torch.uint8, device=like.device)
        self.frames = [self._whole[a:b] for a, b in itertools.pairwise(sent)]
        size = 0 if plan.is_whole else plan.replies[plan.rank].size
        self.reply = torch.zeros(size, dtype=torch.uint8, device=like.device)
        tensors, count = [run.tensor for run in plan.runs], len(plan.sizes)
        self._tensor_of, self._grid = self._table(tensors), (count,)
        self._message_of = self._table([run.message for run in plan.runs])
        self._own_tensors = self._table([run.tensor for run in plan.mine])
        #: the runs of each tensor, this rank's own shard of it, and where the flags of messages are
        self._runs = self._table(np.searchsorted(tensors, np.arange(count + 1)))
        owned = np.full(count, -1)
        owned[[run.tensor for run in plan.mine]] = np.arange(len(plan.mine))
        self._owned = self._table(owned)
        self._sent_flags = self._table(np.array(sent[:-1]) + START)
        self._flags = self._table(np.array(arriving[:-1]) + START)
        #: which runs' codes mean numbers, and which tensors get new states
        self._known, self._fine = (self._int32(n) for n in (len(tensors), count))
        self._places = {name: _Places() for name in ("out", "residual", "owned")}
        #: of a step: what was coded, what is left of sums, and the codes
        self._none = torch.empty(0, device=like.device)
        self._base = self._left = self._none
        self._made: Made | None = None

    def encode(
        self, gradients: Column, residuals: Column | None, randoms: Sequence[Any]
    ) -> list[torch.Tensor]:
        """Write the codes of all runs, and return the messages with them."""
        plan = self._plan
        self._base = x = _joined(gradients.arrays)
        if residuals is not None:
            add_scaled(x, _joined(residuals.arrays), 1.0)
        if plan.foreign:
            x = copy(x)
            for i, foreign in self._foreign().items():
                add_scaled(x[self._tensors[i]], foreign, 1.0)
        self._made = self._codes.encode(x, randoms, self._whole)
        with torch.cuda.device_of(x):
            kernels.mark[self._grid](
                *(self._made.notes, self._runs, self._whole, self._sent_flags, len(plan.messages))
            )
        return self.frames

    def add_up(self, arrived: torch.Tensor, owned: Column, randoms: Sequence[Any]) -> torch.Tensor:
        """Write the codes of what the rank's own shards add up to, and return their message.

        Args:
            arrived: the messages of all ranks, end to end.
            owned: what owners have left out.
        """
        plan = self._plan
        if self._own is None:
            return self.reply
        self._left = left = _joined([owned.arrays[i].reshape(-1)[own] for i, own, _ in plan.mine])
        self._own.read(arrived, left, add=True, ranks=plan.size)
        made = self._own.encode(left, randoms, self.reply)
        made.take_off(left)
        made.look(left)
        with torch.cuda.device_of(left):
            kernels.mark_sums[self._grid](
                *(made.notes, self._owned, arrived, len(arrived) // plan.size, START, plan.size),
                self.reply,
            )
        return self.reply

    def settle(
        self, arrived: torch.Tensor, out: Column, residuals: Column | None, owned: Column | None
    ) -> None:
        """Write averages, and states of tensors that are finite, given the messages of all ranks
        end to end."""
        plan, size = self._plan, self._plan.size
        with torch.cuda.device_of(arrived):
            kernels.decide[self._grid](
                *(arrived, self._flags, len(self._flags), self._runs, self._message_of),
                *(self._known, self._fine),
                is_whole=plan.is_whole,
            )
        total, layout = torch.zeros_like(self._base), self._results.layout
        self._results.read(arrived, total, add=plan.is_whole, ranks=size if plan.is_whole else 1)
        notes = self._results.finite(total) if plan.is_whole else None
        left = self._residual()
        with torch.cuda.device_of(arrived):
            kernels.write_means[(len(layout.elements),)](
                *(self._at("out", out, plan.runs), total, self._known),
                *(layout.tasks, layout.elements, float(size)),
                width=WIDTH,
                **_EXACT,
            )
            if residuals is not None:
                to = self._at("residual", residuals, plan.runs)
                self._write_states(to, left, self._tensor_of, layout, notes)
            if owned is not None:
                self._forget_foreign(owned)
            if owned is not None and self._own is not None:
                to = self._at("owned", owned, plan.mine)
                self._write_states(to, self._left, self._own_tensors, self._own.layout)
        # Nothing as large as the gradients is kept between steps.
        self._base = self._left = self._none
        self._made = None

    def _write_states(
        self,
        to: torch.Tensor,
        x: torch.Tensor,
        tensors: torch.Tensor,
        layout: Layout,
        notes: torch.Tensor | None = None,
    ) -> None:
        kernels.write_states[(len(layout.elements),)](
            *(to, x, self._fine, tensors, self._fine if notes is None else notes),
            *(layout.tasks, layout.elements),
            looks=notes is not None,
            width=WIDTH,
        )

    def _residual(self) -> torch.Tensor:
        """Return what is left of what this rank has coded, in the place of that."""
        base, made = self._base, self._made
        assert made is not None
        if not self._feeds_back:
            return base
        if not self._plan.foreign:
            made.take_off(base)
            return base
        sent = torch.zeros_like(base)
        made.decode(sent)
        for i, foreign in self._foreign().items():
            add_scaled(sent[self._tensors[i]], foreign, -1.0)
        return add_scaled(base, sent, -1.0)

    def _foreign(self) -> dict[int, torch.Tensor]:
        return {i: from_numpy(x, self._base) for i, x in self._plan.foreign.items()}

    def _forget_foreign(self, owned: Column) -> None:
        """Drop what has gone along, which is seldom any; the host waits to know it."""
        if self._plan.foreign:
            fine = to_numpy(self._fine)
            for i in [i for i in self._plan.foreign if fine[i]]:
                owned.arrays[i].data.zero_()
                del self._plan.foreign[i]

    def _at(self, which: str, column: Column, runs: Sequence[Any]) -> torch.Tensor:
        """Return the addresses of runs in the arrays of a column."""
        tensors, starts = [run.tensor for run in runs], [4 * run.own.start for run in runs]
        return self._places[which].on_device(column.addresses[tensors] + starts, self._fine)

    def _codes_at(
        self,
        runs: Sequence[Any],
        spans: list[slice],
        messages: Sequence[Any],
        starts: Any,
        like: torch.Tensor,
    ) -> Codes:
        """Return the codes of runs in messages that begin at ``starts``."""
        places = [starts[r] + messages[r].codes[i].start for i, _, r in runs]
        return Codes([self._plan.codecs[run.tensor] for run in runs], spans, like, places)

    def _table(self, rows: Any) -> torch.Tensor:
        # At once: whoever finds it later may be in another stream.
        return torch.from_numpy(np.array(rows, np.int64)).to(self._device)

    def _int32(self, n: int) -> torch.Tensor:
        return torch.empty(n, dtype=torch.int32, device=self._device)


class _Places:
    """A table of addresses, which is uploaded when they change."""

    def __init__(self) -> None:
        self._known, self._table = np.empty(0, np.int64), torch.empty(0)

    def on_device(self, found: np.ndarray, like: torch.Tensor) -> torch.Tensor:
        if not np.array_equal(found, self._known):
            self._known, self._table = found, from_numpy(found, like)
        return self._table


def _joined(arrays: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return arrays end to end, in new memory."""
    x = end_to_end(arrays)
    return copy(x) if len(arrays) == 1 else x


def _starts(messages: Sequence[Any]) -> list[int]:
    """Return where messages begin that are end to end, and where the last one ends."""
    return [0, *itertools.accumulate(message.size for message in messages)]


def _end_to_end(sizes: Sequence[int]) -> list[slice]:
    return [slice(a, b) for a, b in itertools.pairwise([0, *itertools.accumulate(sizes)])]


def _inside(whole: slice, own: slice) -> slice:
    return slice(whole.start + own.start, whole.start + own.stop)
