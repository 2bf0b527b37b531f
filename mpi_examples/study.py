"""What the examples have in common that train several methods with several seeds."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from tqdm import tqdm

Run = TypeVar("Run")


def check_counts(parser: argparse.ArgumentParser, options: argparse.Namespace, *names: str) -> None:
    """Refuse options of these names that are less than 1."""
    for name in names:
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more")


def each_run(
    names: Iterable[str], seeds: int, train: Callable[[str, int], Run], rank: int
) -> dict[str, list[Run]]:
    """Train each with every seed, and return the runs by name; rank 0 shows a bar."""
    runs: dict[str, list[Run]] = {name: [] for name in names}
    with tqdm(total=len(runs) * seeds, unit="run", disable=rank != 0, ncols=90) as bar:
        for seed in range(seeds):
            for name, group in runs.items():
                bar.set_postfix_str(f"{name}, seed {seed}")
                group.append(train(name, seed))
                bar.update()
    return runs


def rate(done: float) -> float:
    """Return what to multiply the learning rate with when that share of a run is done: up within a
    tenth, and down along a cosine to a tenth and not to 0, by which SlowMo divides."""
    return min(0.55 + 0.45 * math.cos(math.pi * done), 0.1 + 9 * done)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return the mean and, of several values, one standard deviation."""
    text = f"{statistics.mean(values):.{digits}f}"
    return f"{text} +- {statistics.stdev(values):.{digits}f}" if len(values) > 1 else text
