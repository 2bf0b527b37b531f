"""Recipes of train_large_batch.py, its table and its picture."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt

from hvd_compress.cli.tables import text_table
from hvd_compress.stats import human_bytes
from mpi_examples.report import save
from mpi_examples.study import spread


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the learning rate of the small batch becomes that of the large one, and who steps."""

    says: str
    scaling: str | None = None  # "linear", "sqrt" or none
    warms_up: bool = False
    optimizer: str = "SGD"
    takes_sam: bool = False
    is_large: bool = True


RECIPES = {
    "small": Recipe("SGD, small batch", is_large=False),
    "large": Recipe("SGD, same rate"),
    "linear": Recipe("SGD, linear scaling", "linear"),
    "warmup": Recipe("SGD, linear scaling, warm-up", "linear", True),
    "lars": Recipe("LARS, linear scaling, warm-up", "linear", True, "LARS"),
    "lamb": Recipe("LAMB, sqrt scaling, warm-up", "sqrt", True, "LAMB"),
    "sam": Recipe("SAM, linear scaling, warm-up", "linear", True, takes_sam=True),
}


@dataclasses.dataclass
class Run:
    """What a run ended with, and what it cost."""

    accuracy: float
    loss: float
    steps: int
    sent: int


def table(runs: Mapping[str, list[Run]]) -> str:
    """One row for each recipe and compression."""
    rows = []
    for cell, group in runs.items():
        name, _, compression = cell.partition(" ")
        rows.append(
            (
                f"{name:<7} {RECIPES[name].says}",
                compression,
                spread([run.accuracy for run in group]) + " %",
                f"{statistics.mean(run.loss for run in group):.4f}",
                str(group[0].steps),
                human_bytes(group[0].sent),
            )
        )
    header = "recipe", "compression", "test accuracy", "training loss", "steps", "sent in all"
    return text_table(header, rows)


def picture(
    sizes: Sequence[int], errors: Mapping[str, list[list[float]]], epochs: int, path: Path
) -> None:
    """Errors in %, one for each seed, by recipe and batch size."""
    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    for name, found in errors.items():
        means = [statistics.mean(each) for each in found]
        spreads = [statistics.stdev(each) if len(each) > 1 else 0.0 for each in found]
        axes.errorbar(sizes, means, spreads, marker=".", capsize=3, label=RECIPES[name].says)
    axes.set(xscale="log", yscale="log", xlabel="examples a step", ylabel="test error [%]")
    axes.set_xticks(sizes, map(str, sizes), minor=False)
    axes.set_xticks([], minor=True)
    axes.set_title(f"Digits, {epochs} epochs: what a large batch costs")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    save(figure, path)
