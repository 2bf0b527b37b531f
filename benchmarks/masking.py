"""When momentum factor masking and a warm-up of the density pay: DGC beside top-k.

    python -m benchmarks.fetch_mnist
    python -m benchmarks.masking
    python -m benchmarks.masking --load --seeds 5
    python -m benchmarks.masking --overview

Trains a network of three layers on MNIST, and the LSTM of mpi_examples/accuracy.py on text, all
ranks in this process.  DGC clears the velocity of what it sends (masking), so the more it sends,
the less momentum there is; dense training without momentum is the limit.  Results are kept in
``--results`` and not trained again; with ``--load`` nothing is trained.  ``--overview`` prints the
table of docs/methods/dgc.md."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional
from tqdm import tqdm

from benchmarks.turns import write_rows
from hvd_compress.cli.options import parser_of
from hvd_compress.engines.lockstep import World
from mpi_examples import accuracy
from mpi_examples.data import Arrays, mnist, mnist_cache, mnist_folder
from mpi_examples.demo import compressor
from mpi_examples.study import spread, warmed_up

RESULTS = Path(__file__).with_suffix(".json")
INPUTS, CLASSES, BATCH = 784, 10, 128  # of all ranks together
WARMUP = 1  # epoch in which the learning rate rises from a tenth, and the density falls


class Cell(NamedTuple):
    """One row: what it is called, and how it is trained; ``density`` of methods that name none,
    which fall to it."""

    label: str
    method: str
    task: str = "mnist"
    lr: float = 0.05
    epochs: int = 4
    ranks: int = 4
    momentum: float = 0.9
    density: float = 0.001
    hidden: str = "64-32"  # widths of the layers between, on MNIST

    def key(self, seed: int) -> str:
        """The options that a run depends on."""
        options = {name: value for name, value in self._asdict().items() if name != "label"}
        return " ".join(f"{name}={value}" for name, value in (options | {"seed": seed}).items())

    def train(self, seed: int, folder: Path) -> dict[str, Any]:
        if self.task == "mnist":
            return train(self, seed, _mnist(folder))
        changes = self._asdict()
        settings = accuracy.TASKS[self.task].settings
        settings = settings._replace(**{n: changes[n] for n in settings._fields if n in changes})
        return accuracy.train(accuracy.Wanted(self.task, settings, self.method, seed))


def dgc(density: float, masking: bool, warmup: bool = False, **options: Any) -> Cell:
    """DGC that keeps its density from the first step, or falls to it in the first epoch."""
    made = [] if warmup else [f"density={density}"]
    made += [] if masking else ["masking=false"]
    label = f"DGC {percent(density)}{'' if masking else ', no masking'}"
    label += ", warm-up" if warmup else ""
    return Cell(label, ":".join(filter(None, ("dgc", ",".join(made)))), density=density, **options)


def percent(density: float) -> str:
    return f"{100 * density:g} %"


def trio(density: float, **options: Any) -> list[Cell]:
    """Masked, not masked, and top-k."""
    top_k = Cell(f"top-k {percent(density)}", f"topk:density={density}", density=density, **options)
    return [dgc(density, True, **options), dgc(density, False, **options), top_k]


def named(words: str, cells: list[Cell]) -> list[Cell]:
    return [cell._replace(label=f"{cell.label}, {words}") for cell in cells]


DENSITIES, RATES = (0.001, 0.01, 0.1), (0.015, 0.05, 0.15, 0.5)
DENSE = Cell("dense", "none")
PLAIN = Cell("dense, no momentum", "none", momentum=0.0)
TEXT: dict[str, Any] = {"task": "lstm", "lr": 8.0, "epochs": 2}
WIDE: dict[str, Any] = {"hidden": "512-256", "epochs": 6}
LOW, HIGH = {**WIDE, "lr": 0.015}, {**WIDE, "lr": 0.15}
PARTS: dict[str, list[Cell]] = {
    "density": [DENSE, PLAIN, *(cell for density in DENSITIES for cell in trio(density))],
    "warm-up": [
        *(dgc(d, masking, warmup=True) for d in (0.001, 0.01) for masking in (True, False)),
        Cell("top-k 0.1 %, warm-up", "topk"),
    ],
    "rate": [
        cell
        for lr in RATES
        if lr != DENSE.lr
        for cell in named(
            f"lr {lr}",
            [
                *(cell._replace(lr=lr) for cell in (DENSE, PLAIN)),
                *trio(0.01, lr=lr),
                dgc(0.001, True, lr=lr),
                dgc(0.1, True, lr=lr),
            ],
        )
    ],
    "steps": [
        cell
        for epochs in (2, 12)
        for cell in named(
            f"{epochs} epochs",
            [
                DENSE._replace(epochs=epochs),
                *(cell for density in (0.001, 0.01) for cell in trio(density, epochs=epochs)),
            ],
        )
    ],
    "wide": [
        DENSE._replace(**WIDE),
        *(cell for density in (0.01, 0.001) for cell in trio(density, **WIDE)),
    ],
    "wide, low rate": [DENSE._replace(**LOW), *trio(0.01, **LOW), *trio(0.001, **LOW)],
    "wide, high rate": [DENSE._replace(**HIGH), *trio(0.01, **HIGH)],
    "ranks": named("16 ranks", [*trio(0.001, ranks=16), *trio(0.01, ranks=16)]),
    "text": [
        DENSE._replace(**TEXT),
        *(cell for density in (0.01, 0.001) for cell in trio(density, **TEXT)),
        *(dgc(0.01, masking, warmup=True, **TEXT) for masking in (True, False)),
    ],
}
#: of the overview: how its columns are trained, and the methods in its rows
COLUMNS: dict[str, dict[str, Any]] = {
    "MNIST": {},
    "12 epochs": {"epochs": 12},
    "a wider network": WIDE,
    "text, perplexity": TEXT,
}
ROWS = [
    DENSE,
    *(dgc(0.001, masking, warmup) for warmup in (True, False) for masking in (True, False)),
    trio(0.001)[2],
    *(dgc(0.01, masking, warmup) for warmup in (True, False) for masking in (True, False)),
    trio(0.01)[2],
]

_mnist = functools.cache(mnist)


def train(cell: Cell, seed: int, data: Arrays) -> dict[str, Any]:
    """Return the test accuracy and loss after each epoch, and the bytes that a rank sent: a step,
    and in the last."""
    torch.set_num_threads(1)
    x, x_test, y, y_test = map(torch.from_numpy, data)
    x, x_test = x.reshape(-1, INPUTS), x_test.reshape(-1, INPUTS)
    widths = INPUTS, *map(int, cell.hidden.split("-")), CLASSES
    weights = drawn(widths, np.random.default_rng(seed))
    #: Nesterov's, of the optimizer where the method does not have it
    velocities = {name: np.zeros_like(w.detach().numpy()) for name, w in weights.items()}
    method = compressor(cell.method, cell.density, WARMUP)
    inside = cell.momentum if method.takes_momentum else 0.0
    world = World(method, cell.ranks, fused=True)
    batches, scores, losses, bytes_sent = len(x) // BATCH, [], [], []
    for epoch in range(cell.epochs):
        order = np.random.default_rng([seed, epoch]).permutation(len(x))[: batches * BATCH]
        for step, at in enumerate(order.reshape(batches, cell.ranks, -1)):
            world.epoch = now = epoch + step / batches
            gradients = []
            for mine in at:
                loss = functional.cross_entropy(logits(weights, x[mine]), y[mine])
                own = torch.autograd.grad(loss, [*weights.values()])
                gradients.append({n: g.numpy() for n, g in zip(weights, own, strict=True)})
            before = world.record.bytes_sent
            lr = cell.lr * warmed_up(now / cell.epochs, WARMUP / cell.epochs)
            outcomes = world.exchange_all(gradients, momentum=inside, nesterov=inside > 0)[0]
            bytes_sent.append(world.record.bytes_sent - before)
            for name, outcome in outcomes.items():
                d = np.array(outcome.direction)
                if cell.momentum and not inside:
                    u = velocities[name]
                    u += d
                    u *= np.float32(cell.momentum)
                    d += u
                weights[name].detach().numpy()[...] -= np.float32(lr) * d
        with torch.no_grad():
            z = logits(weights, x_test)
            scores.append(100 * (z.argmax(-1) == y_test).double().mean().item())
            losses.append(functional.cross_entropy(z, y_test).item())
    return {
        **{"final": scores[-1], "test_loss": losses[-1], "scores": scores, "losses": losses},
        **{"sent": statistics.mean(bytes_sent), "sent_last": bytes_sent[-1]},
    }


def drawn(widths: tuple[int, ...], random: np.random.Generator) -> dict[str, torch.Tensor]:
    """Return weights of linear layers, as PyTorch draws them."""
    weights = {}
    for layer, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        for name, shape in (("weight", (outputs, inputs)), ("bias", outputs)):
            w = random.uniform(-(inputs**-0.5), inputs**-0.5, shape).astype(np.float32)
            weights[f"{name}{layer}"] = torch.from_numpy(w).requires_grad_()
    return weights


def logits(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return what a network of linear layers says, with rectifiers between them."""
    layers = len(weights) // 2
    for layer in range(layers):
        x = functional.linear(x, weights[f"weight{layer}"], weights[f"bias{layer}"])
        x = x.relu() if layer + 1 < layers else x
    return x


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], metavar="PART")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each row")
    parser.add_argument("--data-dir", default=str(mnist_cache()), help="with MNIST's files")
    parser.add_argument("--results", type=Path, default=RESULTS, help="what was trained")
    parser.add_argument("--load", action="store_true", help="train nothing: show what is known")
    parser.add_argument("--overview", action="store_true", help="one table of all that is known")
    options = parser.parse_args()
    known = json.loads(options.results.read_text()) if options.results.exists() else {}
    if options.overview:
        print(overview(known))
        return
    cells = [cell for part in options.parts for cell in PARTS[part]]
    runs = {c.key(seed): (c, seed) for seed in range(options.seeds) for c in cells}
    missing = {} if options.load else {key: run for key, run in runs.items() if key not in known}
    folder = Path(options.data_dir)
    if any(cell.task == "mnist" for cell, _ in missing.values()):
        try:
            folder = mnist_folder(options.data_dir)
        except argparse.ArgumentTypeError as error:
            parser.error(str(error))
    for key, (cell, seed) in tqdm(missing.items(), unit="run", disable=not missing):
        known[key] = cell.train(seed, folder)
        save(known, options.results)
    for part in options.parts:
        print(f"\n{part}\n{table(PARTS[part], options.seeds, known)}")


def save(known: dict[str, Any], path: Path) -> None:
    rounded = json.loads(json.dumps(known), parse_float=lambda text: round(float(text), 5))
    write_rows(rounded, path)


def table(cells: list[Cell], seeds: int, known: dict[str, Any]) -> str:
    """One row a cell of which a run is known: the mean, and one standard deviation."""
    lines = ["| | score | test loss | sent per step | in the last | seeds |", f"|{'---|' * 6}"]
    for cell in cells:
        found = [known[key] for seed in range(seeds) if (key := cell.key(seed)) in known]
        if found:
            scores = spread([run["final"] for run in found])
            loss = statistics.mean(run["test_loss"] for run in found)
            sent, last = (
                statistics.mean(run[key] for run in found) / 1024 for key in ("sent", "sent_last")
            )
            lines.append(
                f"| {cell.label} | {scores} | {loss:.4f} | {sent:.1f} KiB | {last:.1f} KiB "
                f"| {len(found)} |"
            )
    return "\n".join(lines)


def overview(known: dict[str, Any]) -> str:
    """One row a method, one column a training: means of all seeds, with one standard deviation."""
    lines = [f"| | {' | '.join(COLUMNS)} |", f"|{'---|' * (len(COLUMNS) + 1)}"]
    for row in ROWS:
        entries = []
        for training in COLUMNS.values():
            keys = [row._replace(**training).key(seed) for seed in range(5)]
            finals = [known[key]["final"] for key in keys if key in known]
            entries.append(spread(finals).replace("+-", "±") if len(finals) > 2 else "-")
        lines.append(f"| {row.label} | {' | '.join(entries)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
