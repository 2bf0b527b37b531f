"""What the examples have in common that train several methods with several seeds."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence


def check_counts(parser: argparse.ArgumentParser, options: argparse.Namespace, *names: str) -> None:
    """Refuse options of these names that are less than 1."""
    for name in names:
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more")


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return the mean and, of several values, one standard deviation."""
    text = f"{statistics.mean(values):.{digits}f}"
    return f"{text} +- {statistics.stdev(values):.{digits}f}" if len(values) > 1 else text
