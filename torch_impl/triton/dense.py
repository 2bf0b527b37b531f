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

from ..backend import from_numpy
from . import dense_kernels as kernels
from .tasks import numbered

#: elements that a program takes
_WIDTH = 1024
#: products and sums are not contracted, since the bits must be those of NumPy
_EXACT = {"enable_fp_fusion": False}


class SumStep:
    """The steps of a bucket.  Columns are those of gradients, results and, with momentum,
    velocities; all arrays are tensors on the GPU of ``like``."""

    def __init__(self, sizes: Sequence[int], like: torch.Tensor) -> None:
        self._device, self._count = like.device, len(sizes)
        blocks = numbered(-(-np.array(sizes) // _WIDTH))
        self._blocks = self._table(np.stack(blocks, 1).astype(np.int32))
        self._grid = (len(self._blocks),)
        starts = np.cumsum([0, *sizes[:-1]])
        self._tensors = self._table(np.stack([sizes, starts], 1))
        self._size, self._like = sum(sizes), torch.empty(0, device=like.device)
        #: which tensors are not finite: this rank's, and their means
        self._infinite = torch.empty(2, len(sizes), dtype=torch.int32, device=like.device)
        #: of the last step
        self._places, self._addresses = np.empty(0, np.int64), self._tensors
        self._known_momenta, self._momenta = np.empty(0), self._like

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
        momenta = momenta_of(momentum, self._count)
        if not np.array_equal(momenta, self._known_momenta):
            self._known_momenta, self._momenta = momenta, from_numpy(momenta, self._like)
        kind, infinite = 0 if momentum is None else 2 if nesterov else 1, self._infinite[1]
        with torch.cuda.device_of(total):
            tables = self._tables(columns)
            if kind:
                kernels.look[self._grid](
                    *(*tables[1:], total, infinite, float(size)), width=_WIDTH, **_EXACT
                )
            kernels.settle[self._grid](
                *(*tables, total, infinite, self._momenta, float(size)),
                kind=kind,
                width=_WIDTH,
                **_EXACT,
            )

    def _tables(self, columns: Sequence[Column]) -> tuple[torch.Tensor, ...]:
        """Return the addresses of all arrays, the tensors, and each program's block."""
        x, out, *velocity = (column.addresses for column in columns)
        places = np.stack([x, out, *(velocity or [x])], 1)
        if not np.array_equal(places, self._places):
            self._places, self._addresses = places, from_numpy(places, self._like)
        return self._addresses, self._tensors, self._blocks

    def _table(self, rows: np.ndarray) -> torch.Tensor:
        # At once: whoever finds it later may be in another stream.
        return torch.from_numpy(rows).to(self._device)
