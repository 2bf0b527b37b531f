"""Which measure of a trained network tells how well it generalises?  A study on small networks.

    python -m mpi_examples.generalization
    python -m mpi_examples.generalization --grid full --output docs/generalization.png
    python -m mpi_examples.generalization --load results/generalization.json
    mpirun -np 4 python -m mpi_examples.generalization

Networks of all combinations of the hyper-parameters are trained on few digits, each until its loss
is small, and measured; the ranks share them.  Tables say how well the order of each measure is that
of the generalisation gap.
"""
# ruff: noqa: E402  A process that is no rank must not import MPI, which starts with it.

from __future__ import annotations

import argparse
import copy
import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from hvd_compress.cli.options import parser_of, picture_file
from hvd_compress.integrations.launch import under_mpirun
from mpi_examples.data import digits
from mpi_examples.generalization_report import Study, picture, tables

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


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--grid", choices=GRIDS, default="quick", help="networks to train")
    parser.add_argument("--examples", type=int, default=400, help="digits to train on, of 1797")
    parser.add_argument("--ranks", type=int, default=4, help="when started without mpirun")
    parser.add_argument("--output", type=picture_file, default=Path("results/generalization.png"))
    parser.add_argument("--results", type=Path, default=Path("results/generalization.json"))
    parser.add_argument("--load", type=Path, help="results of an earlier study: train nothing")
    options = parser.parse_args()
    if options.ranks < 1:
        parser.error("--ranks must be 1 or more")
    if not 100 <= options.examples <= 1400:
        parser.error("--examples must be 100 to 1400: the others are for testing")
    if options.load and not options.load.is_file():
        parser.error(f"--load: there is no file {options.load}")
    return options


def show(study: Study, output: Path) -> None:
    print(tables(study))
    picture(study, output)
    print(f"\n{output.resolve()}")


options = arguments()
if options.load:
    show(Study(**json.loads(options.load.read_text())), options.output)
    raise SystemExit
under_mpirun(options.ranks)

import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional

from hvd_compress.torch.studies.measures import take_all

world = MPI.COMM_WORLD


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


def main() -> None:
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
    start = time.perf_counter()
    progress = tqdm(mine, unit="network", disable=world.rank != 0, ncols=90, mininterval=1)
    found = world.gather([run(setting, data) for setting in progress])
    if world.rank:
        return
    runs = [each for part in found for each in part if each]
    study = Study(list(grid), n, len(everything), sorted(runs, key=lambda each: each["setting"]))
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(study.as_json()) + "\n")
    print(f"\n{len(everything)} networks in {time.perf_counter() - start:.0f} s")
    show(study, options.output)
    print(options.results.resolve())


if __name__ == "__main__":
    main()
