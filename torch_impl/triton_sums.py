"""Norms, means and largest magnitudes of runs of elements in a GPU's memory, in Triton.

A tensor has runs of ``length`` elements, of which the last one may be shorter.  Sums are float64,
in the order that :func:`hvd_compress.kernels.reference.sums` defines.  The host waits for nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton

from . import triton_sum_kernels as kernels

#: elements that a program takes, and blocks of a sum
WIDTH, _ROWS = 1024, 8
#: products and sums are not contracted, since the bits must be those of NumPy
EXACT = {"enable_fp_fusion": False}


def grid(n: int) -> tuple[int]:
    """Return how many programs take ``n`` elements."""
    return (triton.cdiv(n, WIDTH),)


def sums(
    x: torch.Tensor, length: int, term: Any, shift: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sum (float64) of a term of the elements of each run."""
    n = x.numel()
    while True:
        blocks = triton.cdiv(length, kernels.SUMMED.value)
        count = triton.cdiv(n, length) * blocks
        found = torch.empty(count, dtype=torch.float64, device=x.device)
        kernels.sums[(triton.cdiv(count, _ROWS),)](
            *(x, found if shift is None else shift, found, n, length, blocks, count),
            term=term,
            rows=_ROWS,
            **EXACT,
        )
        if blocks == 1:
            return found
        # The sums of a run are added up in the same way.
        x, n, length, term, shift = found, count, blocks, kernels.PLAIN, None


def of_sums(
    found: torch.Tensor, out: torch.Tensor, kind: Any, n: int = 1, clip: float = 1.0
) -> None:
    """Write to ``out`` (float32 or float64) what ``kind`` makes of each sum of ``n`` elements."""
    bits = np.float64(clip).view(np.int64).item()
    kernels.of_sums[grid(out.numel())](
        found, out, out.numel(), n, bits, kind=kind, width=WIDTH, **EXACT
    )


def limit_of(x: torch.Tensor, clip: float) -> torch.Tensor:
    """Return so many standard deviations of all elements, Inf where they are alike."""
    n = x.numel()
    mean = torch.empty(1, dtype=torch.float64, device=x.device)
    limit = torch.empty(1, dtype=torch.float32, device=x.device)
    of_sums(sums(x, n, kernels.PLAIN), mean, kernels.MEAN, n)
    of_sums(sums(x, n, kernels.DEVIATION, mean), limit, kernels.LIMIT, n, clip)
    return limit


def largest(x: torch.Tensor, length: int) -> torch.Tensor:
    """Return the largest magnitude of each run, as an integer."""
    runs, blocks = triton.cdiv(x.numel(), length), triton.cdiv(length, kernels.SUMMED.value)
    found = torch.zeros(runs, dtype=torch.int32, device=x.device)
    kernels.largest[(triton.cdiv(runs * blocks, _ROWS),)](
        x, found, x.numel(), length, blocks, runs * blocks, rows=_ROWS
    )
    return found
