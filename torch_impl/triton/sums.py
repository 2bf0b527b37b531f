"""Norms, means and largest magnitudes of runs of elements in a GPU's memory, in Triton.

Runs are those of a :class:`~hvd_compress.torch.triton.tasks.Layout`.  Sums are float64, in the
order that :func:`hvd_compress.kernels.reference.sums` defines.  The host waits for nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton

from . import sum_kernels as kernels
from .tasks import EXACT, WIDTH, Layout

#: blocks of a sum that a program takes
_ROWS = 8


def sums(
    x: torch.Tensor, layout: Layout, term: Any, shifts: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sum (float64) of a term of the elements of each run."""
    for level in layout.levels:
        found = torch.empty(len(level), dtype=torch.float64, device=x.device)
        kernels.sums[(triton.cdiv(len(level), _ROWS),)](
            *(x, found if shifts is None else shifts, found, level, len(level)),
            term=term,
            rows=_ROWS,
            **EXACT,
        )
        # The sums of a run are added up in the same way.
        x, term, shifts = found, kernels.PLAIN, None
    return x


def of_sums(
    found: torch.Tensor, layout: Layout, out: torch.Tensor, kind: Any, clip: float | None = None
) -> None:
    """Write the result that ``kind`` makes of the sum of each run where its head is in ``out``
    (float32). If there is something to ``clip`` by, they are one after the other."""
    bits = np.float64(clip or 0.0).view(np.int64).item()
    kernels.of_sums[_programs(found)](
        *(found, out, layout.runs, found.numel(), bits),
        kind=kind,
        placed=clip is None,
        width=WIDTH,
        **EXACT,
    )


def limits_of(x: torch.Tensor, layout: Layout, clip: float) -> torch.Tensor:
    """Return a number of standard deviations of each run, which is all of its task; Inf if its
    elements are alike."""
    found = sums(x, layout, kernels.PLAIN)
    means, limits = torch.empty_like(found), torch.empty_like(found, dtype=torch.float32)
    of_sums(found, layout, means, kernels.MEAN, clip)
    of_sums(sums(x, layout, kernels.DEVIATION, means), layout, limits, kernels.LIMIT, clip)
    return limits


def scales(
    x: torch.Tensor,
    layout: Layout,
    out: torch.Tensor,
    kind: Any,
    most: int,
    limits: torch.Tensor | None,
) -> None:
    """Write the scale of each run, by its largest magnitude, where its head is in ``out``."""
    found = torch.zeros(len(layout.runs), dtype=torch.int32, device=x.device)
    level = layout.levels[0]
    kernels.largest[(triton.cdiv(len(level), _ROWS),)](x, found, level, len(level), rows=_ROWS)
    kernels.of_largest[_programs(found)](
        *(found, out if limits is None else limits, out, layout.runs, found.numel(), float(most)),
        kind=kind,
        clipped=limits is not None,
        width=WIDTH,
    )


def pairs_of_means(x: torch.Tensor, layout: Layout, out: torch.Tensor) -> None:
    """Write the means of negative elements and of others, of each run, where its heads are."""
    found = [sums(x, layout, term) for term in (kernels.LOW, kernels.HIGH, kernels.MANY)]
    kernels.two_means[_programs(found[0])](
        *(*found, out, layout.runs, found[0].numel()), width=WIDTH
    )


def _programs(found: torch.Tensor) -> tuple[int]:
    return (triton.cdiv(found.numel(), WIDTH),)
