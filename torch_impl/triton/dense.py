"""Sums of the tensors of a bucket in a GPU's memory, in Triton, with the bits of NumPy.

Whether values are finite is found out on the GPU, and decides there what is sent and written: the
host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hvd_compress.kernels import Column
from hvd_compress.kernels.arrays import Momentum, momenta_of

from . import dense_kernels as kernels
from .tasks import EXACT, Table, blocks_of, table_of

#: elements that a program takes
_WIDTH = 1024


class SumStep:
    """The steps of a bucket.  Columns are those of gradients, results and, with momentum,
    velocities; all arrays are tensors on the GPU of ``like``."""

    def __init__(self, sizes: Sequence[int], like: torch.Tensor) -> None:
        self._device, self._count = like.device, len(sizes)
        self._blocks = blocks_of(np.array(sizes), _WIDTH, like.device)
        self._grid = (len(self._blocks),)
        starts = np.cumsum([0, *sizes[:-1]])
        self._tensors, self._size = table_of(np.stack([sizes, starts], 1), like.device), sum(sizes)
        #: which tensors are not finite: this rank's, and their means
        self._infinite = torch.empty(2, len(sizes), dtype=torch.int32, device=like.device)
        self._addresses, self._momenta = Table(self._tensors), Table(self._tensors)

    def joined(self, columns: Sequence[Column]) -> torch.Tensor:
        """Return the gradients end to end, in new memory; one that is not finite is NaN
        everywhere."""
        self._infinite.zero_()
        own = torch.empty(self._size, device=self._device)
        with torch.cuda.device_of(own):
            tables = self._tables(columns)
            given = own, self._infinite[0]
            kernels.join[self._grid](*tables, *given, width=_WIDTH)
            kernels.spoil[self._grid](*tables[1:], *given, width=_WIDTH)
        return own

    def settle(
        self,
        columns: Sequence[Column],
        total: torch.Tensor,
        size: int,
        momentum: Momentum = None,
        nesterov: bool = False,
    ) -> None:
        """Write results and velocities, given the sum of all ranks' gradients; ``momentum`` is
        ``None`` without velocities."""
        momenta = self._momenta.of(momenta_of(momentum, self._count))
        kind, infinite = 0 if momentum is None else 2 if nesterov else 1, self._infinite[1]
        with torch.cuda.device_of(total):
            tables = self._tables(columns)
            if kind:
                kernels.look[self._grid](
                    *(*tables[1:], total, infinite, float(size)), width=_WIDTH, **EXACT
                )
            kernels.settle[self._grid](
                *(*tables, total, infinite, momenta, float(size)),
                kind=kind,
                width=_WIDTH,
                **EXACT,
            )

    def _tables(self, columns: Sequence[Column]) -> tuple[torch.Tensor, ...]:
        """Return the addresses of all arrays, the tensors, and each program's block."""
        x, out, *velocity = (column.addresses for column in columns)
        places = np.stack([x, out, *(velocity or [x])], 1)
        return self._addresses.of(places), self._tensors, self._blocks
