"""Which measure of a trained network tells how well it generalises?  A study on small networks.

    python -m mpi_examples.generalization
    python -m mpi_examples.generalization --grid full --output docs/generalization.png
    mpirun -np 4 python -m mpi_examples.generalization

Networks of all combinations of the hyper-parameters are trained on few digits, each until its loss
is small, and measured; the ranks share them.  Tables say how well the order of each measure is that
of the generalisation gap.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn
from torch.nn import functional
from tqdm import tqdm

from hvd_compress.cli.options import parser_of, picture_file, positive
from hvd_compress.launch import under_mpirun
from hvd_compress.studies import measures
from hvd_compress.studies.measures import Scores
from mpi_examples.data import digits
from mpi_examples.report import save

GRIDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "tiny": {
        **{"batch size": (16, 64), "dropout": (0.0,), "learning rate": (3.0,), "depth": (1,)},
        **{"optimizer": ("sgd",), "weight decay": (0.0,), "width": (32, 128)},
    },
    "quick": {
        **{"batch size": (16, 64), "dropout": (0.0, 0.2), "learning rate": (1.0, 3.0)},
        **{"depth": (1, 2), "optimizer": ("sgd",), "weight decay": (0.0,), "width": (32, 128)},
    },
    "full": {
        **{"batch size": (16, 64), "dropout": (0.0, 0.2), "learning rate": (1.0, 3.0)},
        **{"depth": (1, 2, 3), "optimizer": ("sgd", "adam"), "weight decay": (0.0, 5e-4)},
        **{"width": (32, 128)},
    },
}
#: learning rates that the hyper-parameter multiplies
RATES = {"sgd": 0.02, "adam": 0.001}
#: training ends here, or is given up
LOSS, EPOCHS = 0.01, 150


#: options that are believed to widen the gap with more of them (1), or to narrow it (-1)
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

    def values(self, name: str) -> list[float]:
        return [run["measures"][name] for run in self.runs]

    def scored(self) -> dict[str, Scores]:
        """All measures and what they have to beat, baselines first."""
        names = list(self.runs[0]["measures"])
        ordered = sorted(names, key=lambda name: name not in BASELINES)
        found = {name: self._score(self.values(name)) for name in ordered}
        for noise in ORACLES:
            random = np.random.default_rng(1)
            oracle = self.gaps + random.normal(0, noise * self.gaps.std(), len(self.gaps))
            found[f"oracle {noise:g} sd"] = self._score(oracle)
        found["random"] = self._score(np.random.default_rng(0).random(len(self.runs)))
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
            belief = BELIEFS[axis] * np.asarray(column, float)
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


def picture(study: Study) -> plt.Figure:
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
    return figure


def make_model(depth: int, width: int, dropout: float) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for i in range(depth):
        layers += [nn.Linear(width if i else 64, width), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def make_optimizer(name: str, model: nn.Module, rate: float, decay: float) -> torch.optim.Optimizer:
    rate *= RATES[name]
    if name == "adam":
        return torch.optim.Adam(model.parameters(), rate, weight_decay=decay)
    return torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=decay)


def run(setting: tuple[Any, ...], data: list[torch.Tensor]) -> dict[str, Any] | None:
    """Train and measure one network; ``None`` if its loss does not become small."""
    from hvd_compress.torch.studies.measures import take_all

    batch, dropout, rate, depth, name, decay, width = setting
    x, x_test, y, y_test = data
    torch.manual_seed(0)
    model = make_model(depth, width, dropout)
    initial, optimizer = copy.deepcopy(model), make_optimizer(name, model, rate, decay)
    epochs = 0
    while epochs < EPOCHS:
        epochs += 1
        model.train()
        for examples in torch.randperm(len(x)).split(batch):
            optimizer.zero_grad()
            functional.cross_entropy(model(x[examples]), y[examples]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            if functional.cross_entropy(model(x), y).item() <= LOSS:
                break
    else:
        return None
    with torch.no_grad():
        train, test = ((model(a).argmax(1) == b).double().mean().item() for a, b in
                       ((x, y), (x_test, y_test)))  # fmt: skip
    return {
        "setting": setting,
        "gap": train - test,
        "epochs": epochs,
        "measures": take_all(model, initial, x, y, tolerance=1e-3),
    }


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--grid", choices=GRIDS, default="quick", help="networks to train")
    parser.add_argument("--examples", type=int, default=400, help="digits to train on, of 1797")
    parser.add_argument("--ranks", type=positive, default=4, help="when started without mpirun")
    parser.add_argument("--output", type=picture_file, default=Path("results/generalization.png"))
    options = parser.parse_args()
    if not 100 <= options.examples <= 1400:
        parser.error("--examples must be 100 to 1400: the others are for testing")
    return options


def main() -> None:
    options = arguments()
    under_mpirun(options.ranks)
    from mpi4py import MPI  # which starts with it: ranks only

    world = MPI.COMM_WORLD
    torch.set_num_threads(1)
    x, x_test, y, y_test = digits(0)
    x, y = np.concatenate([x, x_test]), np.concatenate([y, y_test])
    n = options.examples
    data = [torch.from_numpy(part) for part in (x[:n], x[n:], y[:n], y[n:])]
    grid = GRIDS[options.grid]
    everything = list(itertools.product(*grid.values()))
    # Large networks stand side by side: in this order ranks take about equally long.
    order = np.random.default_rng(0).permutation(len(everything))
    mine = [everything[i] for i in order[world.rank :: world.size]]
    progress = tqdm(mine, unit="network", disable=world.rank != 0, ncols=90, mininterval=1)
    found = world.gather([run(setting, data) for setting in progress])
    if world.rank:
        return
    runs = [each for part in found for each in part if each]
    study = Study(list(grid), n, len(everything), sorted(runs, key=lambda each: each["setting"]))
    print(f"\n{tables(study)}")
    save(picture(study), options.output)


if __name__ == "__main__":
    main()
