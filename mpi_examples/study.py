"""What the examples have in common that train several methods with several seeds."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence


def check_counts(parser: argparse.ArgumentParser, options: argparse.Namespace, *names: str) -> None:
    """Refuse options of these names that are less than 1."""
    for name in names:
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more")


def rate(done: float) -> float:
    """Return what to multiply the learning rate with when that share of a run is done: up within a
    tenth, and down along a cosine to a tenth and not to 0, by which SlowMo divides."""
    return min(0.55 + 0.45 * math.cos(math.pi * done), 0.1 + 9 * done)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return the mean and, of several values, one standard deviation."""
    text = f"{statistics.mean(values):.{digits}f}"
    return f"{text} +- {statistics.stdev(values):.{digits}f}" if len(values) > 1 else text
