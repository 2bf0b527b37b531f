"""The losses that methods cost, as benchmarks/quality.py has measured them by training."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

#: rows that ``python -m benchmarks.quality --minutes 0 --advice`` makes of the runs
FILE = Path(__file__).with_suffix(".json")


class Recipe(NamedTuple):
    """A training that methods are compared in.

    Attributes:
        optimizer: "sgd", "adamw" or "muon".
        unit: of what is lost: "%" of the test loss of dense training, or "points" of accuracy.
        tolerance: what may be lost by default, in that unit.
        what: a model and its data.
    """

    optimizer: str
    unit: str
    tolerance: float
    what: str


RECIPES = {
    "bytes": Recipe("adamw", "%", 0.5, "a transformer over bytes"),
    "bytes-muon": Recipe("muon", "%", 0.5, "a transformer over bytes"),
    "mnist": Recipe("sgd", "points", 0.2, "MNIST"),
}
OPTIMIZERS = tuple(dict.fromkeys(recipe.optimizer for recipe in RECIPES.values()))


class MeasuredLoss(NamedTuple):
    """The loss of a method in one recipe.

    Attributes:
        recipe: one of ``RECIPES``.
        steps: of the training.
        method: as the harness calls it, such as "topk:density=0.01".
        lost: in the unit of the recipe, the mean over the seeds; infinite if training diverges.
        seeds: how many.

    >>> loss_of("topk:density=0.01", "adamw", steps=1000).within()
    False
    """

    recipe: str
    steps: int
    method: str
    lost: float
    seeds: int

    def within(self, tolerance: float | None = None) -> bool:
        """Return whether no more is lost than that, in the unit of the recipe; ``None``: the
        recipe's own tolerance."""
        most = RECIPES[self.recipe].tolerance if tolerance is None else tolerance
        return self.lost <= most

    def __str__(self) -> str:
        unit = RECIPES[self.recipe].unit
        return f"{self.lost:.2f} {unit}" if math.isfinite(self.lost) else "diverges"


@functools.cache
def all_losses() -> tuple[MeasuredLoss, ...]:
    rows = json.loads(FILE.read_text())
    return tuple(
        MeasuredLoss(**row | {"lost": math.inf if row["lost"] is None else row["lost"]})
        for row in rows
    )


def losses_of(method: str, optimizer: str) -> Iterator[MeasuredLoss]:
    """Yield what a method loses in each training with an optimizer."""
    for loss in all_losses():
        if loss.method == method and RECIPES[loss.recipe].optimizer == optimizer:
            yield loss


def loss_of(method: str, optimizer: str, steps: int) -> MeasuredLoss | None:
    """Return what a method loses in the training whose length is nearest, or ``None`` if it was
    never trained with that optimizer.

    Args:
        method: as the harness calls it.
        optimizer: one of ``OPTIMIZERS``.
        steps: of the training that is asked for.
    """

    def distance(loss: MeasuredLoss) -> float:
        return abs(math.log(loss.steps / steps))

    return min(losses_of(method, optimizer), key=distance, default=None)
