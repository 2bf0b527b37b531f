"""Places of the elements and codes of many tensors, for kernels that take them all at once.

A *task* is a run of elements of one code, such as a tensor or a rank's shard of it.  They are
anywhere in one flat array, and their code is anywhere in an array of bytes.  A program takes one
block of one task, and finds both in tables, which are made once for the tensors of a bucket.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton

from ..backend import from_numpy
from .task_kernels import HEADS, LENGTH, SIZE, START, SUMMED, N

#: elements, or bytes, that a program takes
WIDTH = 1024
#: products and sums are not contracted, since the bits must be those of NumPy
EXACT = {"enable_fp_fusion": False}
#: a program's random numbers may begin so many elements in front of its task
_SKEW = 7


class Span(NamedTuple):
    """A task: its elements, from ``start`` to ``stop``, and the bytes after all heads.

    It also has the number of elements that share heads, and that of heads (float32) of each such
    run.
    """

    start: int
    stop: int
    length: int
    heads: int
    size: int


class Layout:
    """Tables of tasks, in the memory of the GPU of ``like``.

    Args:
        spans: the tasks.
        like: a tensor on the GPU.
        places: the first byte of each code, heads first; multiples of 4.

    Attributes:
        sizes: the elements of each task.
        tasks: the table.
    """

    def __init__(self, spans: Sequence[Span], like: torch.Tensor, places: Sequence[int]) -> None:
        self.sizes = [span.stop - span.start for span in spans]
        self._device, rows = like.device, []
        for (start, stop, length, heads, size), at in zip(spans, places, strict=True):
            behind = at + 4 * heads * triton.cdiv(stop - start, length)
            rows.append((start, stop - start, length, at // 4, behind, size))
        self._rows, self._heads = np.array(rows, np.int64), np.array([x.heads for x in spans])
        self.tasks = self._table(self._rows)

    def __len__(self) -> int:
        return len(self.sizes)

    @functools.cached_property
    def elements(self) -> torch.Tensor:
        """The blocks of programs that take elements."""
        return self._blocks(self._rows[:, N.value] + _SKEW, WIDTH)

    @functools.cached_property
    def packed(self) -> torch.Tensor:
        """The blocks of programs that take bytes after heads."""
        return self._blocks(self._rows[:, SIZE.value], WIDTH)

    @functools.cached_property
    def words(self) -> torch.Tensor:
        """The blocks of programs that take words of these bytes."""
        return self._blocks(self._rows[:, SIZE.value], 8 * WIDTH)

    @functools.cached_property
    def runs(self) -> torch.Tensor:
        """The place of the first head of each run, the number of elements of its task, and its own
        (int64)."""
        task, number, start, stop = self._of_runs()
        place = self._rows[task, HEADS.value] + number * self._heads[task]
        return self._table(np.stack([place, self._rows[task, N.value], stop - start], 1))

    @functools.cached_property
    def levels(self) -> list[torch.Tensor]:
        """The parts that are added up, and the parts of these sums, up to one per run.

        Each block has its first element and its end, its task, and its run (int64).
        """
        task, _, start, stop = self._of_runs()
        levels = []
        while True:
            counts = -(-(stop - start) // SUMMED.value)
            run, block = numbered(counts)
            first = start[run] + block * SUMMED.value
            last = np.minimum(first + SUMMED.value, stop[run])
            levels.append(self._table(np.stack([first, last, task[run], run], 1)))
            if (counts == 1).all():
                return levels
            stop = np.cumsum(counts)
            start = stop - counts

    def _of_runs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """For each run, its task, its number there, and from and up to which element it goes."""
        start, n, length = (self._rows[:, column.value] for column in (START, N, LENGTH))
        task, number = numbered(-(-n // length))
        first = start[task] + number * length[task]
        return task, number, first, np.minimum(first + length[task], (start + n)[task])

    def _blocks(self, sizes: np.ndarray, width: int) -> torch.Tensor:
        return blocks_of(sizes, width, self._device)

    def _table(self, rows: np.ndarray) -> torch.Tensor:
        return table_of(rows, self._device)


class Table:
    """Rows in the memory of the GPU of ``like``, such as addresses.  They are uploaded when they
    change, and are those of the last step most often."""

    def __init__(self, like: torch.Tensor) -> None:
        self._like, self._known, self._uploaded = like, np.empty(0), like

    def of(self, rows: np.ndarray) -> torch.Tensor:
        """Return these rows there."""
        if not np.array_equal(rows, self._known):
            self._known, self._uploaded = rows, from_numpy(rows, self._like)
        return self._uploaded


def table_of(rows: npt.ArrayLike, device: torch.device) -> torch.Tensor:
    """Return rows that stay the same, in a GPU's memory."""
    # At once: whoever finds it later may be in another stream.
    return torch.from_numpy(np.ascontiguousarray(rows)).to(device)


def blocks_of(sizes: np.ndarray, width: int, device: torch.device) -> torch.Tensor:
    """Return task and block of each program (int32)."""
    return table_of(np.stack(numbered(-(-sizes // width)), 1).astype(np.int32), device)


def numbered(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, for the parts of some wholes, the whole of each and its number there."""
    whole = np.repeat(np.arange(len(counts)), counts)
    return whole, np.arange(len(whole)) - np.repeat(np.cumsum(counts) - counts, counts)
