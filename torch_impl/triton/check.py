"""Whether the loops in Triton run on a GPU and give the bits that they should: a small selection,
before gradients rely on them."""

from __future__ import annotations

import numpy as np
import torch

from hvd_compress.kernels import Steps, reference

from ..backend import from_numpy, to_numpy
from . import loops

_SIZES, _COUNTS, _MOMENTUM = (5000, 70), (50, 3), 0.9


def problem_of(device: torch.device) -> str | None:
    """Return what is wrong, or ``None``."""
    random, like = np.random.default_rng(0), torch.empty(0, device=device)
    rows = [[random.standard_normal(n).astype(np.float32) for _ in range(5)] for n in _SIZES]
    expected, steps = Steps.of(rows), Steps.of([[from_numpy(x, like) for x in row] for row in rows])
    try:
        selection = loops.Selection(_SIZES, _COUNTS)
        found = selection.select(steps, _MOMENTUM)
        selection.settle(steps, found.indices, found.values, True, found.finite)
        states = [to_numpy(x) for row in steps.rows() for x in row]
    except Exception as error:  # of its compiler, the driver or the launch: these have no base
        text = str(error).partition("\n")[0]
        return f"Triton's kernels fail there ({type(error).__name__}: {text})"
    plain = reference.Selection(_SIZES, _COUNTS)
    wanted = plain.select(expected, _MOMENTUM, False)
    plain.settle(expected, wanted.indices, wanted.values, True, wanted.finite)
    pairs = [
        (found.indices, wanted.indices),
        (found.values, wanted.values),
        *zip(states, (x for row in expected.rows() for x in row), strict=True),
    ]
    if all(own.tobytes() == other.tobytes() for own, other in pairs):
        return None
    return "Triton's kernels give other bits there than NumPy"
