"""The loops of :mod:`hvd_compress.kernels` for tensors in a GPU's memory, in Triton, with the same
bits.

Every kernel runs over all tensors of a bucket, whose addresses are in a table.  One pass notes
candidates: the elements whose magnitude is at least one that was predicted.
Then the k-th largest magnitude of each tensor is found digit by digit (radix selection) among its
candidates; or among all elements, if there are fewer than k candidates, or in a block more than it
has room for.  So a prediction changes the time and never the choice.

The host waits once, for the selected entries of the whole bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton

from hvd_compress.kernels import Column, Selected, Steps
from hvd_compress.kernels.arrays import Momentum, momenta_of

from ..backend import from_numpy
from . import kernels, low_rank
from .codecs import Codes, placed

__all__ = ["KEEPS", "Codes", "Selection", "add_up", "low_rank", "placed", "stream"]

#: new states are written in a second pass
KEEPS = False

#: elements of a block, and candidates that it has room for
WIDTH, ROOM = 4096, 256
#: entries that a program takes
_ENTRIES = 1024
#: the digits of a magnitude, from the first to the last: lower bits, and its own
_DIGITS = ((20, 11), (10, 10), (0, 10))
#: products and sums are not contracted, since the bits must be those of NumPy
_EXACT = {"enable_fp_fusion": False}


class Selection:
    """See :class:`hvd_compress.kernels.Selection`; all arrays are tensors on one GPU.

    Args:
        sizes, counts: as there; sizes are below 2**31.
        width, room: elements of a block, and candidates that it has room for; powers of two.
    """

    def __init__(
        self, sizes: Sequence[int], counts: Sequence[int], width: int = WIDTH, room: int = ROOM
    ) -> None:
        blocks = [-(-n // width) for n in sizes]
        rows = zip(sizes, counts, _starts(blocks), _starts(counts), strict=True)
        numbers = np.arange(len(sizes))
        self._tensors = np.array([*rows], np.int64)
        self._blocks, self._entries = np.repeat(numbers, blocks), np.repeat(numbers, counts)
        #: what is added to a place within a tensor, by entry
        self._shifts = np.repeat(_starts(sizes), counts)
        self._width, self._room = width, room
        self._memory: _Memory | None = None
        #: momenta, their kind, and whether all addresses are multiples of 16: of the last step
        self._move: Any = None

    def select(self, steps: Steps, momentum: Momentum = None, nesterov: bool = False) -> Selected:
        like = steps.gradients.arrays[0]
        if self._memory is None or self._memory.device != like.device:
            self._memory = _Memory(self._tensors, self._blocks, self._entries, self._room, like)
        memory = self._memory
        table = _table(steps)
        memory.addresses = from_numpy(table, like)
        kind = 0 if momentum is None else 2 if nesterov else 1
        momenta = from_numpy(momenta_of(momentum, len(table)), like)
        self._move = momenta, kind, not (table % 16).any()
        with torch.cuda.device_of(like):
            self._select(memory, *self._move)
        memory.on_host.copy_(memory.selected)  # the only thing that the host waits for
        values, places, most = memory.parts(memory.on_host)
        return Selected(
            places.numpy() + self._shifts,
            values.numpy().copy(),
            most.numpy() < kernels.INFINITY.value,
        )

    def _select(self, memory: _Memory, momenta: torch.Tensor, kind: int, aligned: bool) -> None:
        blocks, tensors = (self._blocks.size,), (len(self._tensors),)
        form = {"width": self._width, "room": self._room}
        tables = memory.addresses, memory.tensors, memory.blocks
        candidates = memory.found, memory.largest, memory.counts, memory.kept
        memory.counters.zero_()
        kernels.search[blocks](
            *(*tables, memory.thresholds, *candidates, momenta),
            **form,
            kind=kind,
            aligned=aligned,
            num_warps=8,
            **_EXACT,
        )
        for histograms, (shift, digits) in zip(memory.histograms, _DIGITS, strict=True):
            kernels.count_digits[blocks](
                *(*tables, *candidates, memory.prefixes, histograms, momenta),
                **form,
                kind=kind,
                shift=shift,
                digits=digits,
                num_warps=2,
                **_EXACT,
            )
            kernels.decide_digit[tensors](
                *(memory.tensors, memory.largest, memory.thresholds),
                *(memory.prefixes, memory.missing, histograms),
                shift=shift,
                is_first=shift == _DIGITS[0][0],
            )
        kernels.count_selected[blocks](
            *(*tables, *candidates, memory.prefixes, *memory.hits, momenta),
            **form,
            kind=kind,
            num_warps=2,
            **_EXACT,
        )
        kernels.write_selected[blocks](
            *(*tables, *candidates, memory.prefixes, memory.missing),
            *(*memory.hits, *memory.hits.cumsum(1), *memory.parts(memory.selected), momenta),
            **form,
            kind=kind,
            num_warps=2,
            **_EXACT,
        )

    def settle(
        self,
        steps: Steps,
        indices: np.ndarray,
        remaining: np.ndarray,
        masking: bool,
        finite: np.ndarray,
    ) -> None:
        """As there, with the indices of the last ``select``, which are on the GPU still."""
        memory, like = self._memory, steps.gradients.arrays[0]
        assert memory is not None
        momenta, kind, _ = self._move
        table = _table(steps)
        memory.addresses = from_numpy(table, like)
        fine = from_numpy(finite.astype(np.int64), like)
        _, places, _ = memory.parts(memory.selected)
        with torch.cuda.device_of(like):
            kernels.move[(self._blocks.size,)](
                *(memory.addresses, memory.tensors, memory.blocks, momenta, fine),
                kind=kind,
                aligned=not (table % 16).any(),
                width=self._width,
                num_warps=8,
                **_EXACT,
            )
            kernels.settle[(triton.cdiv(remaining.size, _ENTRIES),)](
                *(memory.addresses, memory.entries, places, from_numpy(remaining, places)),
                *(remaining.size, fine),
                masking=masking,
                width=_ENTRIES,
            )


class _Memory:
    """The arrays that a selection keeps on the GPU of ``like``."""

    def __init__(
        self,
        tensors: np.ndarray,
        blocks: np.ndarray,
        entries: np.ndarray,
        room: int,
        like: torch.Tensor,
    ) -> None:
        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=like.device)

        # Every part starts at a multiple of 16 bytes, or kernels would be compiled anew.
        count, levels = len(tensors), len(_DIGITS)
        rows, columns = _padded(count), _padded(blocks.size)
        self.device = like.device
        self.tensors = from_numpy(tensors, like)
        self.blocks, self.entries = from_numpy(blocks, like), from_numpy(entries, like)
        self.addresses = self.tensors  # until there are any
        #: of the magnitudes of candidates; none at first
        self.thresholds = empty(count).fill_(2**31 - 1)
        #: what is zero at the start of a step
        self.counters = empty(rows * (2 + levels * kernels.BINS.value))
        self.found, self.largest, histograms = self.counters.tensor_split([rows, 2 * rows])
        self.histograms = histograms.view(levels, -1)
        self.counts, self.kept = empty(blocks.size), empty(blocks.size * room)
        #: magnitudes above the k-th largest and equal to it, by block
        self.hits = empty(2, columns)
        self.prefixes, self.missing = empty(count), empty(count)
        self.selected = empty(2 * _padded(entries.size) + count)
        self.on_host = torch.empty_like(self.selected, device="cpu", pin_memory=like.is_cuda)

    def parts(self, selected: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the values and places of the selected entries, and the tensors' largest
        magnitudes."""
        k = self.entries.numel()
        start, end = _padded(k), 2 * _padded(k)
        return selected[:k].view(torch.float32), selected[start : start + k], selected[end:]


def add_up(
    out: Column,
    indices: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
    size: int,
) -> None:
    """See :func:`hvd_compress.kernels.add_up`; ``out`` is on one GPU, and the host waits for
    nothing."""
    bounds, addresses, like = np.cumsum([0, *out.sizes]), out.addresses, out.arrays[0]
    places = []
    for own in indices:
        if own.size and (own[0] < 0 or own[-1] >= bounds[-1] or (own[1:] <= own[:-1]).any()):
            raise ValueError("indices must be ascending and in range")
        tensors = np.repeat(np.arange(len(out.sizes)), np.diff(np.searchsorted(own, bounds)))
        places.append(addresses[tensors] + 4 * (own - bounds[tensors]))
    torch._foreach_zero_(list(out.arrays))
    if entries := sum(own.size for own in places):
        everything = from_numpy(np.concatenate(values), like)
        # A stable sort leaves those of one address in the order of the ranks.
        ascending, order = from_numpy(np.concatenate(places), like).sort(stable=True)
        with torch.cuda.device_of(like):
            kernels.add_sorted[(triton.cdiv(entries, _ENTRIES),)](
                *(ascending, order, everything, entries, len(values), float(size)),
                width=_ENTRIES,
                **_EXACT,
            )


def stream(arrays: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
    """See :func:`hvd_compress.kernels.stream`; the tensors start at multiples of 16 bytes."""
    like = arrays[0][0]
    blocks = [-(-row[0].numel() // WIDTH) for row in arrays]
    tensors = [
        (row[0].numel(), 0, first, 0) for row, first in zip(arrays, _starts(blocks), strict=True)
    ]
    steps = Steps.of((g, v, v, u, u) for g, u, v in arrays)
    tables = (_table(steps), np.array(tensors), np.repeat(np.arange(len(arrays)), blocks))
    with torch.cuda.device_of(like):
        kernels.stream[(sum(blocks),)](
            *(from_numpy(table, like) for table in tables), width=WIDTH, num_warps=8
        )


def _table(steps: Steps) -> np.ndarray:
    """Return the addresses of all arrays but those where old states are kept."""
    return np.ascontiguousarray(steps.tables()[0][:, :5])


def _padded(n: int) -> int:
    return n + -n % 4


def _starts(sizes: Sequence[int]) -> np.ndarray:
    return np.cumsum([0, *sizes[:-1]])
