"""Methods on real gradients in one step: error and bits, side by side.

    python -m benchmarks.codec_errors --json benchmarks/codec_errors.json

Each of four ranks computes gradients of a model on its own batch, after some steps of AdamW. Their
mean goes once through each method, late in a training but with nothing that waits from steps
before.  The error is that of the mean over its squared norm (vNMSE): 0 of an exact mean, 1 of none.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from benchmarks.turns import write_rows
from hvd_compress.cli.options import parser_of
from hvd_compress.engines.lockstep import World
from hvd_compress.errors import NeedsTuning
from hvd_compress.methods import as_compressor, method_names
from mpi_examples.data import columns, digits, segments, standard_library
from mpi_examples.models import LSTM, Transformer, cnn, mlp

VARIANTS = ["fp8:format=e5m2", "linear:bits=6,column=256", "linear:bits=4,column=256"]

parser = parser_of(__doc__)
parser.add_argument("--methods", nargs="+", default=[*method_names(), *VARIANTS], metavar="METHOD")
parser.add_argument("--ranks", type=int, default=4)
parser.add_argument("--steps", type=int, default=20, help="of AdamW before gradients are taken")
parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured")
options = parser.parse_args()
_LATE = 250_000  # behind the dense steps and warm-ups that some methods begin with
#: the gradient of each rank, by name
Gradients = list[dict[str, np.ndarray]]


def gradients_of(model: torch.nn.Module, losses: Callable[[int, int], torch.Tensor]) -> Gradients:
    """Train a while, and return the ranks' gradients; ``losses(step, rank)``."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(options.steps):
        optimizer.zero_grad()
        losses(step, 0).backward()
        optimizer.step()
    found = []
    for rank in range(options.ranks):
        model.zero_grad()
        losses(options.steps, rank).backward()
        named = model.named_parameters()
        found.append({name: p.grad.numpy().copy() for name, p in named if p.grad is not None})
    return found


def of_digits(make: Callable[..., torch.nn.Module]) -> Gradients:
    torch.manual_seed(0)
    x, _, y, _ = map(torch.from_numpy, digits(0))
    model = make((1, 8, 8), 10)

    def loss(step: int, rank: int) -> torch.Tensor:
        batch = (torch.arange(16) + 16 * (step * options.ranks + rank)) % len(x)
        return functional.cross_entropy(model(x[batch]), y[batch])

    return gradients_of(model, loss)


def of_text(make: Callable[..., torch.nn.Module]) -> Gradients:
    torch.manual_seed(0)
    corpus = standard_library()
    model = make(corpus.words, 128, 16, 0.0)
    parts = [
        list(segments(columns(corpus.train, 8, rank, options.ranks), 16))
        for rank in range(options.ranks)
    ]

    def loss(step: int, rank: int) -> torch.Tensor:
        x, y = parts[rank][step]
        logits, _ = model(x, None)
        return functional.cross_entropy(logits.flatten(0, -2), y.flatten())

    return gradients_of(model, loss)


def measured(method: str, ranks: Gradients) -> tuple[float, float]:
    """The error of the mean, and the bits an element that rank 0 sent."""
    world = World(as_compressor(method), len(ranks))
    world.epoch, world.steps = _LATE, dict.fromkeys(ranks[0], _LATE)
    error = norm = 0.0
    for name, outcome in world.exchange_all(ranks)[0].items():
        mean = np.mean([own[name].astype(np.float64) for own in ranks], axis=0)
        error += float(np.sum((outcome.mean - mean) ** 2))
        norm += float(np.sum(mean**2))
    return error / norm, 8 * world.record.bytes_sent / sum(x.size for x in ranks[0].values())


def main() -> None:
    warnings.simplefilter("ignore", NeedsTuning)  # nothing is trained here
    models = {
        "perceptron": of_digits(mlp),
        "convolutions": of_digits(cnn),
        "LSTM": of_text(LSTM),
        "transformer": of_text(Transformer),
    }
    print(f"{'':26} {'bits':>6}" + "".join(f" {name:>13}" for name in models))
    found = {}
    for method in options.methods:
        cells = {name: measured(method, ranks) for name, ranks in models.items()}
        bits = float(np.mean([bits for _, bits in cells.values()]))
        errors = {name: float(f"{error:.3g}") for name, (error, _) in cells.items()}
        found[method] = {"bits": round(bits, 2), "errors": errors}
        row = "".join(f" {error:13.2e}" for error in errors.values())
        print(f"{method:26} {bits:6.2f}{row}")
    if options.json:
        write_rows(found, options.json)


if __name__ == "__main__":
    main()
