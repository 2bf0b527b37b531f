"""The loops of :mod:`hvd_compress.kernels` for tensors in a GPU's memory, in Triton, with the same
bits.

Every kernel runs over all tensors of a bucket, whose addresses are in a table that is uploaded when
they change.  One pass notes candidates: the elements whose magnitude is at least one that was
predicted.  Then the k-th largest magnitude of each tensor is found digit by digit (radix selection)
among its candidates.  With fewer than k candidates, or more than a block has room for, it is found
among all elements.  So a prediction changes the time and never the choice.

The message is written where it is sent from, and is read where it arrives: the host waits for
nothing.  Tensors are divided into blocks.  A block of the results has a program, which adds the
ranks' entries of that block in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hvd_compress.kernels import Column
from hvd_compress.kernels.arrays import Momentum, momenta_of
from hvd_compress.wire.header import Header, Kind, failing, length_tag, opened

from ..backend import from_numpy
from . import kernels, low_rank
from .codecs import Codes
from .codes_step import CodesStep, joined
from .dense import SumStep
from .tasks import EXACT, Table, table_of

__all__ = [
    "Codes",
    "CodesStep",
    "SumStep",
    "TopKStep",
    "joined",
    "low_rank",
    "stream",
]

#: elements of a block, and candidates that it has room for
WIDTH, ROOM = 4096, 256
#: entries that a program takes at a time
_CHUNK = 128
#: the digits of a magnitude, from the first to the last: lower bits, and its own
_DIGITS = ((20, 11), (10, 10), (0, 10))
_CAUSES = (
    "the ranks do not run the same version with the same compression options, or some have no GPU"
)
#: the smallest magnitudes that are infinite when they are rounded to a dtype
_LIMITS = {"float32": np.inf, "float16": 65520.0, "bfloat16": 2.0**128 - 2.0**119}


class BlockMessage:
    """The layout of a message.

    It has a header, the tensors' largest magnitudes, and the number of the first entry of each
    block (both int32).  Then come values, and the entries' places within their blocks (int16).

    Attributes:
        header: of all messages with this layout.
        nbytes: of a message.
        values, places: the bytes of these.
    """

    def __init__(self, n: int, tensors: int, blocks: int, entries: int, values: str) -> None:
        self.values_dtype = getattr(torch, values)
        self.heads = slice(0, 4 * (kernels.HEADER.value + tensors + blocks))
        self.values = slice(_padded(self.heads.stop, 16), 0)
        stop = self.values.start + entries * self.values_dtype.itemsize
        self.values = slice(self.values.start, stop)
        start = _padded(stop, 16)
        self.places = slice(start, start + 2 * entries)
        self.nbytes = _padded(self.places.stop, 16)
        is_half = values == "float16"
        self.header = Header(Kind.BLOCKS, int(is_half), 0, length_tag(n), entries % 2**32)

    def opened(self, frame: np.ndarray, sender: int) -> None:
        """Look at the header of a message that arrived."""
        fail = failing(f"rank {sender}", _CAUSES)
        if opened(frame, Kind.BLOCKS, fail=fail) != self.header or frame.size != self.nbytes:
            raise fail(f"no header of {self.header.number} entries, or not {self.nbytes} bytes")


class TopKStep:
    """The steps of a bucket: the largest elements of each tensor are sent and averaged.

    Results are those of :class:`hvd_compress.kernels.reference.Selection`.  Columns are those of
    gradients, results, residuals and, with momentum, velocities.  All arrays are tensors on the GPU
    of ``like``, and states are written in place.

    Args:
        sizes: the elements of each tensor, below 2**31.
        counts: how many are sent.
        values: "float32" or "float16", which values are sent as.
        width, room: elements of a block, and candidates that it has room for; powers of two.

    Attributes:
        layout: of the messages.
        message: the memory of this rank's.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        counts: Sequence[int],
        values: str,
        like: torch.Tensor,
        width: int = WIDTH,
        room: int = ROOM,
    ) -> None:
        blocks = [-(-n // width) for n in sizes]
        rows = zip(sizes, counts, _starts(blocks), _starts(counts), strict=True)
        self._width, self._room = width, room
        self._grid, self._entries, self._count = (sum(blocks),), sum(counts), len(sizes)
        self._tensors = table_of(np.array([*rows], np.int64), like.device)
        self._owners = table_of(np.repeat(np.arange(len(sizes)), blocks), like.device)
        self.layout = BlockMessage(sum(sizes), len(sizes), *self._grid, self._entries, values)
        self.message = torch.zeros(self.layout.nbytes, dtype=torch.uint8, device=like.device)
        self._own = self._views(self.message)
        self._memory = _Memory(len(sizes), *self._grid, room, like)
        self._addresses, self._known_momenta = Table(self.message), Table(self.message)
        #: of the last step: whether all addresses are multiples of 16; momenta, and their kind
        self._is_aligned, self._momenta, self._kind = False, self.message, 0

    def encode(
        self, columns: Sequence[Column], momentum: Momentum = None, nesterov: bool = False
    ) -> torch.Tensor:
        """Write the message of the elements that are selected, and return it."""
        self._momenta = self._known_momenta.of(momenta_of(momentum, self._count))
        self._kind = 0 if momentum is None else 2 if nesterov else 1
        with torch.cuda.device_of(self.message):
            self._find(columns)
        return self.message

    def _find(self, columns: Sequence[Column]) -> None:
        memory, momenta, heads = self._memory, self._momenta, self._own[0]
        form = {"kind": self._kind, "width": self._width, "room": self._room}
        tables = self._tables(columns)
        candidates = memory.found, memory.largest, memory.counts, memory.kept
        memory.counters.zero_()
        kernels.search[self._grid](
            *(*tables, memory.thresholds, *candidates, momenta),
            **form,
            aligned=self._is_aligned,
            num_warps=8,
            **EXACT,
        )
        for histograms, (shift, digits) in zip(memory.histograms, _DIGITS, strict=True):
            kernels.count_digits[self._grid](
                *(*tables, *candidates, memory.prefixes, histograms, momenta),
                **form,
                shift=shift,
                digits=digits,
                num_warps=2,
                **EXACT,
            )
            kernels.decide_digit[(self._count,)](
                *(self._tensors, memory.largest, memory.thresholds),
                *(memory.prefixes, memory.missing, histograms),
                shift=shift,
                is_first=shift == _DIGITS[0][0],
            )
        kernels.count_selected[self._grid](
            *(*tables, *candidates, memory.prefixes, *memory.hits, momenta),
            **form,
            num_warps=2,
            **EXACT,
        )
        kernels.write_selected[self._grid](
            *(*tables, *candidates, memory.prefixes, memory.missing),
            *(*memory.hits, *memory.hits.cumsum(1), heads, *self._own[1:], momenta, self._count),
            **form,
            num_warps=2,
            **EXACT,
        )

    def settle(
        self,
        columns: Sequence[Column],
        messages: torch.Tensor,
        size: int,
        masking: bool = False,
        dtypes: Sequence[str] | None = None,
    ) -> None:
        """Write results and states.

        Args:
            messages: of all ranks, end to end.
            size: what sums are divided by.
            masking: velocities of elements that were sent are zero.
            dtypes: of the gradients; where results have no room in them, states stay.  ``None``:
                all have room, and results may be written where gradients are.
        """
        words, values, places = self._views(messages, everything=True)
        row, memory = self.layout.nbytes, self._memory
        ranks = len(messages) // row
        limits, is_limited = memory.limits(dtypes or ["float32"]), dtypes is not None
        counts = self._count, *self._grid, self._entries, ranks, row // 4
        form = {"limited": is_limited, "width": self._width, "chunk": _CHUNK, "num_warps": 8}
        if is_limited:
            memory.overflows.zero_()

        def average() -> None:
            kernels.average[self._grid](
                *(*tables, words, values, places, limits, memory.overflows, *counts),
                *(self.layout.values.start // values.itemsize, row // values.itemsize),
                *(self.layout.places.start // 2, row // 2, float(size)),
                aligned=self._is_aligned,
                **form,
                **EXACT,
            )

        with torch.cuda.device_of(messages):
            tables = self._tables(columns)
            if is_limited:
                average()
            kernels.move[self._grid](
                *(*tables, self._momenta, words, memory.overflows, *self._own, *counts),
                kind=self._kind,
                aligned=self._is_aligned,
                masking=masking,
                **form,
                **EXACT,
            )
            if not is_limited:
                average()

    def _views(self, message: torch.Tensor, everything: bool = False) -> list[torch.Tensor]:
        """Return heads, values and places of a message; of several, all bytes as these."""
        own, whole = self.layout, slice(None)
        parts = [whole] * 3 if everything else [own.heads, own.values, own.places]
        dtypes = torch.int32, own.values_dtype, torch.int16
        return [message[part].view(dtype) for part, dtype in zip(parts, dtypes, strict=True)]

    def _tables(self, columns: Sequence[Column]) -> tuple[torch.Tensor, ...]:
        """Return the addresses of all arrays, the tensors, and the tensor of each block."""
        x, out, *states = (column.addresses for column in columns)
        states += [x] * (2 - len(states))
        places = np.stack([x, out, *states], 1)
        self._is_aligned = not (places % 16).any()
        return self._addresses.of(places), self._tensors, self._owners


class _Memory:
    """The arrays that a selection keeps on the GPU of ``like``."""

    def __init__(self, count: int, blocks: int, room: int, like: torch.Tensor) -> None:
        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=like.device)

        # Every part starts at a multiple of 16 bytes, or kernels would be compiled anew.
        rows, columns, levels = _padded(count, 4), _padded(blocks, 4), len(_DIGITS)
        #: of the magnitudes of candidates; none at first
        self.thresholds = empty(count).fill_(2**31 - 1)
        #: what is zero at the start of a step
        self.counters = empty(rows * (2 + levels * kernels.BINS.value))
        self.found, self.largest, histograms = self.counters.tensor_split([rows, 2 * rows])
        self.histograms = histograms.view(levels, -1)
        self.counts, self.kept = empty(blocks), empty(blocks * room)
        #: magnitudes above the k-th largest and equal to it, by block
        self.hits = empty(2, columns)
        self.prefixes, self.missing = empty(count), empty(count)
        #: whose means have no room in their dtypes, and from where on they have not
        self.overflows = empty(count)
        self._limits = Table(self.thresholds)

    def limits(self, dtypes: Sequence[str]) -> torch.Tensor:
        """Return the smallest magnitudes that are infinite in each of these."""
        return self._limits.of(np.array([_LIMITS[dtype] for dtype in dtypes], np.float32))


def stream(arrays: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
    """See :func:`hvd_compress.kernels.stream`; the tensors start at multiples of 16 bytes."""
    like = arrays[0][0]
    blocks = [-(-row[0].numel() // WIDTH) for row in arrays]
    tensors = [
        (row[0].numel(), 0, first, 0) for row, first in zip(arrays, _starts(blocks), strict=True)
    ]
    g, u, v = (Column(own).addresses for own in zip(*arrays, strict=True))
    owners = np.repeat(np.arange(len(arrays)), blocks)
    tables = (np.stack([g, g, v, u], 1), np.array(tensors), owners)
    with torch.cuda.device_of(like):
        kernels.stream[(sum(blocks),)](
            *(from_numpy(table, like) for table in tables), width=WIDTH, num_warps=8
        )


def _padded(n: int, unit: int) -> int:
    return n + -n % unit


def _starts(sizes: Sequence[int]) -> np.ndarray:
    return np.cumsum([0, *sizes[:-1]])
