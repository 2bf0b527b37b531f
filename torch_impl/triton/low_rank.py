"""The step of the power method of :mod:`hvd_compress.kernels.low_rank` for matrices in a GPU's
memory, in Triton, with the same bits.

Every kernel runs over all matrices of a bucket, whose addresses are in a table that is uploaded
when they change.  Whether a mean is finite is found out on the GPU, and decides there what is
written, so that the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton

from hvd_compress.kernels import Column
from hvd_compress.kernels.low_rank import PowerStep

from . import low_rank_kernels as kernels
from .task_kernels import SUMMED
from .tasks import EXACT, Table, blocks_of, table_of

#: elements that a program takes, and of which it writes the sums with residuals at a time
_WIDTH, _TILE = 1024, 2048
#: sums of sixteen elements each that a program has at a time, and sums of columns, of which there
#: are so many side by side; and parts of a sum
_LINES, _SUMS, _ACROSS, _PARTS = 16, 1024, 16, 8


class PowerStepOnGPU(PowerStep):
    """All arrays are tensors on the GPU of ``like``."""

    MOST_RANK = 16

    def __init__(
        self, shapes: Sequence[tuple[int, int]], ranks: Sequence[int], size: int, like: torch.Tensor
    ) -> None:
        self._size, self._device = float(size), like.device
        dims = np.array([(*shape, rank) for shape, rank in zip(shapes, ranks, strict=True)]).T
        n, m, rank = dims
        ends = np.cumsum(dims[:2] * rank, 1)
        self._matrices = table_of(np.vstack([dims, ends - dims[:2] * rank]).T, self._device)
        self._addresses = Table(torch.empty(0, device=self._device))
        columns = self._columns = triton.next_power_of_2(int(rank.max()))
        #: rows of M that a program takes, and columns, and how many runs of rows of these
        self._rows, sums = max(1, _LINES // columns), min(256, _SUMS // columns)
        self._runs = min(_parts(n, kernels.ROWS.value), sums // _ACROSS)
        self._wide = sums // self._runs
        #: parts of sums along columns of P, and of Q
        self._of_p, self._of_q = (_parts(each, SUMMED.value) for each in (n, m))
        self._of_p = min(self._of_p, 2 * _LINES // columns)
        self._factor_rows = blocks_of(rank, 1, self._device)
        self._row_blocks = blocks_of(n, self._rows, self._device)
        self._column_blocks = blocks_of(m, self._wide, self._device)
        self._element_blocks = blocks_of(n * m, _WIDTH, self._device)
        # Each array of its own, which is aligned: kernels would be compiled anew for others.
        self.rows, self._p = (self._empty(int(ends[0, -1])) for _ in range(2))
        self.own, self._q, self._new = (self._empty(int(ends[1, -1])) for _ in range(3))
        #: of a row of P^T in those before it
        self._shares = self._empty(len(n) * columns).double()
        #: which columns of Q are not zero
        self._alive = self._empty(len(n) * columns)
        #: largest magnitudes, as integers; of which matrices one has to look whether the mean is
        #: finite, and of which it is not
        self._largest, self._unsure, self._overflows = (self._empty(len(n)).int() for _ in "012")

    def left(self, columns: Sequence[Column]) -> torch.Tensor:
        with torch.cuda.device_of(self.rows):
            tables = self._tables(columns)
            kernels.unit[(len(self._factor_rows),)](
                *(*tables, self._factor_rows, self._q, self._largest),
                chunks=self._of_q,
                width=_WIDTH,
                **EXACT,
            )
            kernels.left[(len(self._row_blocks),)](
                *(*tables, self._row_blocks, self._q, self.rows, self._largest),
                adds=_keeps(columns),
                columns=self._columns,
                rows=self._rows,
                width=_TILE // self._rows,
                **EXACT,
            )
            kernels.spoil[(len(self._matrices),)](
                self._matrices, self._largest, self.rows, width=_WIDTH
            )
        return self.rows

    def right(self, columns: Sequence[Column], total: torch.Tensor) -> torch.Tensor:
        with torch.cuda.device_of(self.rows):
            tables = self._tables(columns)
            kernels.orthonormal[(len(self._matrices),)](
                *(self._matrices, total, self._p, self._shares, self._largest, self._size),
                columns=self._columns,
                chunks=self._of_p,
                width=_WIDTH,
                **EXACT,
            )
            kernels.right[(len(self._column_blocks),)](
                *(*tables, self._column_blocks, self._p, self.own),
                array=(kernels.OUT if _keeps(columns) else kernels.X).value,
                columns=self._columns,
                runs=self._runs,
                width=self._wide,
                num_warps=8,
                **EXACT,
            )
        return self.own

    def settle(self, columns: Sequence[Column], total: torch.Tensor) -> None:
        with torch.cuda.device_of(self.rows):
            tables = self._tables(columns)
            kernels.decide[(len(self._matrices),)](
                *(self._matrices, total, self._new, self._alive),
                *(self._largest, self._unsure, self._overflows, self._size),
                columns=self._columns,
                width=_WIDTH // self._columns,
                **EXACT,
            )
            blocks = (len(self._element_blocks),)
            kernels.look[blocks](
                *(self._matrices, self._element_blocks, self._p, self._new),
                *(self._unsure, self._overflows),
                width=_WIDTH,
                **EXACT,
            )
            kernels.settle[blocks](
                *(*tables, self._element_blocks, self._p, self._new, self.own),
                *(self._alive, self._overflows),
                array=(kernels.OUT if _keeps(columns) else kernels.X).value,
                keeps=_keeps(columns),
                columns=self._columns,
                width=_WIDTH,
                **EXACT,
            )

    def _tables(self, columns: Sequence[Column]) -> tuple[torch.Tensor, torch.Tensor]:
        """The addresses of all arrays, and the table of matrices."""
        x, out, factors, *residuals = (column.addresses for column in columns)
        residual = residuals[0] if residuals else x
        return self._addresses.of(np.stack([x, out, residual, factors], 1)), self._matrices

    def _empty(self, n: int) -> torch.Tensor:
        return torch.empty(n, device=self._device)


#: as in :mod:`hvd_compress.kernels.low_rank`
STEP = PowerStepOnGPU


def _keeps(columns: Sequence[Column]) -> bool:
    """Whether there are residuals."""
    return len(columns) > 3


def _parts(lengths: np.ndarray, summed: int) -> int:
    """How many parts of a sum a program adds up at a time."""
    return min(_PARTS, triton.next_power_of_2(-(-int(lengths.max()) // summed)))
