"""Tables and picture of the study in generalization.py."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from hvd_compress.studies import measures
from hvd_compress.studies.measures import Scores
from mpi_examples.report import save

#: who is believed to widen the gap with more of it (1), and who to narrow it
BELIEFS = {
    **{"batch size": 1, "dropout": -1, "learning rate": -1, "depth": -1, "optimizer": 1},
    **{"weight decay": -1, "width": -1},
}
#: in the order in which they are believed in
OPTIMIZERS = ("sgd", "adam")
#: noise of the oracles, in units of the gap's deviation
ORACLES = (0.5, 1.0)
BASELINES = ("vc-dim", "params", "1/margin", "entropy", "cross-entropy")


@dataclasses.dataclass
class Study:
    """Results: hyper-parameters, examples trained on, networks tried, and those that were fit.

    A run has its ``setting`` (one value a hyper-parameter), ``gap``, ``epochs``, ``measures``.
    """

    axes: list[str]
    examples: int
    tried: int
    runs: list[dict[str, Any]]

    def __post_init__(self) -> None:
        if len(self.runs) < 2:
            raise SystemExit(f"{len(self.runs)} of {self.tried} networks were fit: too few")
        self.settings = [tuple(run["setting"]) for run in self.runs]
        self.gaps = np.array([run["gap"] for run in self.runs])

    def as_json(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def values(self, name: str) -> list[float]:
        return [run["measures"][name] for run in self.runs]

    def scored(self) -> dict[str, Scores]:
        """All measures and what they have to beat, baselines first."""
        names = list(self.runs[0]["measures"])
        ordered = sorted(names, key=lambda name: name not in BASELINES)
        found = {name: self._score(self.values(name)) for name in ordered}
        for noise in ORACLES:
            oracle = measures.noisy_oracle(self.gaps, noise * self.gaps.std(), seed=1)
            found[f"oracle {noise:g} sd"] = self._score(oracle)
        found["random"] = self._score(measures.random_measure(len(self.runs)))
        return found

    def _score(self, values: Any) -> Scores:
        return measures.scores(self.settings, values, self.gaps)

    def canonical(self) -> list[float]:
        """psi of each hyper-parameter, with the order that everybody believes in."""
        found = []
        for i, axis in enumerate(self.axes):
            column: list[Any] = [setting[i] for setting in self.settings]
            if axis == "optimizer":
                column = [OPTIMIZERS.index(name) for name in column]
            belief = measures.canonical_ordering(column, BELIEFS[axis])
            found.append(measures.granulated(self.settings, belief, self.gaps)[i])
        return found


def tables(study: Study) -> str:
    """Rank correlations, then information; the columns are those of the paper's tables."""
    found = study.scored()
    width = max(map(len, [*found, "canonical ordering"]))
    gaps = 100 * study.gaps
    lines = [
        f"{len(study.runs)} of {study.tried} networks were fit to {study.examples} digits; their "
        f"gaps are {gaps.min():.1f} to {gaps.max():.1f} points, {gaps.mean():.1f} on average",
        "",
        "Kendall's tau along each hyper-parameter (psi), their mean (Psi), and of all pairs (tau)",
        _row("", [*study.axes, "Psi", "tau"], width),
    ]
    for name, own in found.items():
        lines.append(_row(name, [*own.psi, own.mean_psi, own.tau], width))
    lines.append(_row("canonical ordering", [*study.canonical(), math.nan, math.nan], width))
    lines += [
        "",
        "Information about the sign of a difference of gaps, given one hyper-parameter, none "
        "(|S|=0),\nthe least given two (|S|=2), and the least of all",
        _row("", [*study.axes, "|S|=0", "|S|=2", "least"], width),
    ]
    for name, own in found.items():
        cells = [*own.given_one, own.information, own.given_two, own.least_information]
        lines.append(_row(name, cells, width))
    return "\n".join(lines)


def _row(name: str, cells: list[Any], width: int) -> str:
    texts = [
        cell if isinstance(cell, str) else "-" if math.isnan(cell) else f"{cell:.3f}"
        for cell in cells
    ]
    return f"{name:<{width}} " + " ".join(
        f"{text.replace(' ', '-'):>{9 if i < len(texts) - 3 else 7}}"
        for i, text in enumerate(texts)
    )


def picture(study: Study, path: Path) -> None:
    """Psi and tau by measure, and the gap against the measure with the largest Psi."""
    found = study.scored()
    names = sorted(found, key=lambda name: found[name].mean_psi)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5.5), layout="constrained")
    places = np.arange(len(names))
    for offset, statistic, title in ((0.2, "mean_psi", "Psi"), (-0.2, "tau", "tau")):
        heights = [getattr(found[name], statistic) for name in names]
        left.barh(places + offset, heights, 0.4, label=title)
    left.set_yticks(places, names, fontsize=8)
    left.axvline(0, color="black", lw=0.8)
    left.set(xlabel="rank correlation with the generalisation gap", title="Measures")
    left.legend()
    best = next(name for name in reversed(names) if name in study.runs[0]["measures"])
    widths = [setting[study.axes.index("width")] for setting in study.settings]
    for width in sorted(set(widths)):
        chosen = [i for i, own in enumerate(widths) if own == width]
        values = np.array(study.values(best))[chosen]
        right.scatter(values, 100 * study.gaps[chosen], s=14, label=f"width {width}")
    right.set(xlabel=best, ylabel="generalisation gap [points]", title="Networks")
    right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    save(figure, path)
