"""The codes of a bucket in a GPU's memory, from gradients to averages, in Triton, with the bits of
the host.

All tensors of a bucket are copied end to end, and kernels take them at once.  Their tables are the
same in every step.  Codes are written where they are sent from.  Values that are not finite are
found on the GPU, and decide there what is sent and written: the host waits for nothing.
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hvd_compress.kernels import Column
from hvd_compress.wire.header import START

from ..backend import add_scaled, copy, end_to_end, from_numpy, to_numpy
from . import codec_kernels as kernels
from .codecs import Codes
from .tasks import EXACT, WIDTH, Layout, Table, table_of


class CodesStep:
    """The steps of a bucket.

    Args:
        plan: a :class:`hvd_compress.fused.coded_plan.CodedPlan`, which says what is coded.
        like: a tensor on the GPU.

    Attributes:
        tensors: their places when all are end to end.
        frames: what is sent first: a message to each rank, or to all.
        reply: what is sent of the sums of this rank's own shards.
    """

    def __init__(self, plan: Any, like: torch.Tensor) -> None:
        self._plan, self._device = weakref.proxy(plan), like.device
        self.tensors = _end_to_end(plan.sizes)
        spans = [_inside(self.tensors[run.tensor], run.own) for run in plan.runs]
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
        self._known, self._fine = (
            torch.empty(n, dtype=torch.int32, device=self._device) for n in (len(tensors), count)
        )
        #: addresses, by what is there
        self._places = defaultdict[str, Table](lambda: Table(self._fine))
        #: of a step: what is left of sums, and notes of averages that are not finite
        self._left = self._fine
        self._infinite: torch.Tensor | None = None

    def encode(self, x: torch.Tensor, randoms: Sequence[Any]) -> list[torch.Tensor]:
        """Write the codes of all runs of ``x``, in which tensors are end to end, and return the
        messages with them."""
        plan = self._plan
        if plan.foreign:
            x = copy(x)
            for i, foreign in self._foreign().items():
                add_scaled(x[self.tensors[i]], foreign, 1.0)
        notes = self._codes.encode(x, randoms, self._whole)
        with torch.cuda.device_of(x):
            kernels.mark[self._grid](
                *(notes, self._runs, self._whole, self._sent_flags, len(plan.messages))
            )
        return self.frames

    def sent(self) -> torch.Tensor:
        """Return what the codes of this rank decode to, end to end."""
        sent = torch.zeros(self.tensors[-1].stop, device=self._device)
        self._codes.read(self._whole, sent)
        for i, foreign in self._foreign().items():
            add_scaled(sent[self.tensors[i]], foreign, -1.0)
        return sent

    def add_up(self, arrived: torch.Tensor, owned: Column, randoms: Sequence[Any]) -> torch.Tensor:
        """Write the codes of what the rank's own shards add up to, and return their message.

        Args:
            arrived: the messages of all ranks, end to end.
            owned: what owners have left out.
        """
        plan = self._plan
        if self._own is None:
            return self.reply
        self._left = left = joined([owned.arrays[i].reshape(-1)[own] for i, own, _ in plan.mine])
        self._own.read(arrived, left, kernels.ADD, plan.size)
        notes = self._own.encode(left, randoms, self.reply)
        self._own.read(self.reply, left, kernels.TAKE_OFF)
        self._own.look(left, kernels.LEFT, notes)
        with torch.cuda.device_of(left):
            kernels.mark_sums[self._grid](
                *(notes, self._owned, arrived, len(arrived) // plan.size, START, plan.size),
                self.reply,
            )
        return self.reply

    def mean(self, arrived: torch.Tensor, dtype: str) -> torch.Tensor:
        """Return the averages end to end, given the messages of all ranks end to end.  Also note of
        which tensors they are finite, and have room in the gradients' ``dtype``."""
        plan, layout = self._plan, self._results.layout
        ranks = plan.size if plan.is_whole else 1
        total = torch.zeros(self.tensors[-1].stop, device=self._device)
        with torch.cuda.device_of(arrived):
            kernels.decide[self._grid](
                *(arrived, self._flags, len(self._flags), self._runs, self._message_of),
                *(self._known, self._fine),
                is_whole=plan.is_whole,
            )
            how = kernels.ADD if plan.is_whole else kernels.WRITE
            self._results.read(arrived, total, how, ranks)
            self._infinite = self._results.look(total) if plan.is_whole else None
            kernels.divide[(len(layout.elements),)](
                *(total, self._known, layout.tasks, layout.elements, float(plan.size)),
                width=WIDTH,
                **EXACT,
            )
        if dtype != "float32":
            rounded = total.to(getattr(torch, dtype)).float()
            notes = self._results.look(rounded).view(-1, kernels.NOTES.value)
            has_room = (notes[:, kernels.INFINITE.value] == 0).int()
            self._fine.scatter_reduce_(0, self._tensor_of, has_room, "amin")
        return total

    def write(self, what: str, to: Column, x: torch.Tensor, is_state: bool = True) -> None:
        """Write what is end to end in ``x`` into the arrays of tensors whose average is finite.
        States of others stay as they are, within range."""
        layout, infinite = self._results.layout, self._infinite
        places = self._places_of(what, to, self._plan.runs)
        self._write(places, x, self._tensor_of, layout, infinite, is_state)

    def write_owned(self, owned: Column) -> None:
        """Write what owners have left out."""
        if self._plan.foreign:  # which is seldom; the host waits to know what has gone along
            fine = to_numpy(self._fine)
            for i in [i for i in self._plan.foreign if fine[i]]:
                owned.arrays[i].data.zero_()
                del self._plan.foreign[i]
        if self._own is not None:
            places = self._places_of("owned", owned, self._plan.mine)
            self._write(places, self._left, self._own_tensors, self._own.layout, None, True)

    def forget(self) -> None:
        """Drop what is of one step: nothing as large as the gradients is kept between steps."""
        self._left, self._infinite = self._fine, None

    def _write(
        self,
        places: torch.Tensor,
        x: torch.Tensor,
        tensors: torch.Tensor,
        layout: Layout,
        infinite: torch.Tensor | None,
        is_state: bool,
    ) -> None:
        with torch.cuda.device_of(x):
            kernels.write[(len(layout.elements),)](
                *(places, x, self._fine, tensors, self._fine if infinite is None else infinite),
                *(layout.tasks, layout.elements),
                looks=infinite is not None,
                is_state=is_state,
                width=WIDTH,
            )

    def _places_of(self, what: str, column: Column, runs: Sequence[Any]) -> torch.Tensor:
        """Return the addresses of runs in the arrays of a column."""
        starts = [4 * run.own.start for run in runs]
        return self._places[what].of(column.addresses[[run.tensor for run in runs]] + starts)

    def _foreign(self) -> dict[int, torch.Tensor]:
        return {i: from_numpy(x, self._fine) for i, x in self._plan.foreign.items()}

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
        return table_of(np.array(rows, np.int64), self._device)


def joined(arrays: Sequence[torch.Tensor]) -> torch.Tensor:
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
