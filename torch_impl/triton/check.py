"""A check that the loops in Triton run on a GPU with the bits that they should.  It is a small step
of top-k, before gradients rely on them."""

from __future__ import annotations

import numpy as np
import torch

from hvd_compress.kernels import Column, Steps, reference

from ..backend import from_numpy, to_numpy
from . import loops

_SIZES, _COUNTS, _MOMENTUM = (5000, 70), (50, 3), 0.9


def problem_of(device: torch.device) -> str | None:
    """Return what is wrong, or ``None``."""
    random, like = np.random.default_rng(0), torch.empty(0, device=device)
    rows = [[random.standard_normal(n).astype(np.float32) for _ in range(3)] for n in _SIZES]
    own = [[from_numpy(x.copy(), like) for x in column] for column in zip(*rows, strict=True)]
    x, residuals, velocities = map(Column, own)
    try:
        step = loops.TopKStep(_SIZES, _COUNTS, "float32", like)
        columns = [x, x, residuals, velocities]
        step.settle(columns, step.encode(columns, _MOMENTUM), 1, masking=True)
        found = [to_numpy(array) for array in (*own[1], *own[2], *own[0])]
    except Exception as error:  # of its compiler, the driver or the launch: these have no base
        text = str(error).partition("\n")[0]
        return f"Triton's kernels fail there ({type(error).__name__}: {text})"
    expected = Steps.of([(g, r, r, v, v) for g, r, v in rows])
    plain = reference.Selection(_SIZES, _COUNTS)
    indices, values, finite = plain.select(expected, _MOMENTUM, False)
    plain.settle(expected, indices, np.zeros_like(values), True, finite)
    reference.add_up(expected.gradients, [indices], [values], 1)
    gradients, *states = zip(*rows, strict=True)
    wanted = [x for column in (*states, gradients) for x in column]
    if all(a.tobytes() == b.tobytes() for a, b in zip(found, wanted, strict=True)):
        return None
    return "Triton's kernels give other bits there than NumPy"
