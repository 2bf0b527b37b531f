"""Learning rates for large batches (Goyal et al., 2017, arXiv 1706.02677)."""

from __future__ import annotations

import math

from hvd_compress.config import check_choice, is_whole
from hvd_compress.errors import ConfigError

SCALINGS = ("linear", "sqrt")


def rate_factor(batch_size: int, reference_batch_size: int, scaling: str = "linear") -> float:
    """Return k, by which the learning rate of the reference is multiplied for a larger batch.

    Args:
        batch_size: examples of all ranks in one step.
        reference_batch_size: the batch that the learning rate was chosen for.
        scaling: "linear", the quotient of the two, as for SGD; "sqrt", its root, as for Adam and
            LAMB, whose steps do not grow with the gradient.

    >>> rate_factor(8192, 256), rate_factor(8192, 512, "sqrt")
    (32.0, 4.0)
    """
    check_choice("scaling", scaling, SCALINGS)
    sizes = {"batch_size": batch_size, "reference_batch_size": reference_batch_size}
    for option, size in sizes.items():
        if not is_whole(size) or size < 1:
            raise ConfigError(f"{option} must be a number of examples, 1 or more; got {size!r}")
    quotient = batch_size / reference_batch_size
    return quotient if scaling == "linear" else math.sqrt(quotient)


def check_steps(steps: int) -> None:
    """Raise ``ConfigError`` unless it is a possible length of a warm-up."""
    if not is_whole(steps) or steps < 0:
        raise ConfigError(f"steps must be a number of steps, 0 or more; got {steps!r}")


def warmed_up(step: int, steps: int, start: float, peak: float) -> float:
    """Return the learning rate of a gradual warm-up: up from ``start`` by equal increments every
    step, at ``peak`` from ``steps`` on.

    Args:
        step: from 0.
        steps: the length of the warm-up; 0 for none.
        start, peak: learning rates.

    >>> round(warmed_up(390, steps=780, start=0.1, peak=3.2), 4)
    1.65
    """
    return peak if step >= steps else start + (peak - start) * step / steps
