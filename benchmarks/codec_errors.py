"""What codecs make of real gradients: error, bits and time, side by side.

    python -m benchmarks.codec_errors

Each of four ranks computes gradients of a model on its own batch, after some steps of AdamW. Their
mean goes by an all-to-all through each codec, without error feedback. The error is that of the mean
over its squared norm (vNMSE).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional

from hvd_compress.blocks import alltoall, chain, float8, linear, natural, scaled_sign
from hvd_compress.engines.lockstep import World
from mpi_examples.data import digits
from mpi_examples.data_text import segments, share, standard_library
from mpi_examples.models import cnn, mlp
from mpi_examples.models_text import LSTM, Transformer

parser = argparse.ArgumentParser(
    description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
)
parser.add_argument("--ranks", type=int, default=4)
parser.add_argument("--steps", type=int, default=20, help="of AdamW before gradients are taken")
options = parser.parse_args()
CODECS = {
    "float8 e4m3, buckets of 512": float8("e4m3", 512),
    "float8 e5m2, buckets of 512": float8("e5m2", 512),
    "linear, 8 bits, columns of 512": linear(8, 512),
    "linear, 6 bits, columns of 256": linear(6, 256),
    "linear, 4 bits, columns of 256": linear(4, 256),
    "natural": natural(),
    "scaled sign": scaled_sign(),
}
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
        list(segments(share(corpus.train, 8, rank, options.ranks), 16))
        for rank in range(options.ranks)
    ]

    def loss(step: int, rank: int) -> torch.Tensor:
        x, y = parts[rank][step]
        logits, _ = model(x, None)
        return functional.cross_entropy(logits.flatten(0, -2), y.flatten())

    return gradients_of(model, loss)


def main() -> None:
    models = {
        "perceptron": lambda: of_digits(mlp),
        "convolutions": lambda: of_digits(cnn),
        "LSTM": lambda: of_text(LSTM),
        "transformer": lambda: of_text(Transformer),
    }
    print(f"{'':32} {'bits':>6}" + "".join(f" {name:>13}" for name in models) + f" {'time':>9}")
    gradients = {name: make() for name, make in models.items()}
    for codec_name, codec in CODECS.items():
        errors, bits, seconds = [], 0.0, 0.0
        for ranks in gradients.values():
            world = World(chain(via=alltoall(codec)), len(ranks))
            start = time.process_time()
            outcomes = world.exchange_all(ranks)[0]
            seconds += time.process_time() - start
            error = norm = 0.0
            for name, outcome in outcomes.items():
                mean = np.mean([own[name].astype(np.float64) for own in ranks], axis=0)
                error += float(np.sum((outcome.mean - mean) ** 2))
                norm += float(np.sum(mean**2))
            errors.append(error / norm)
            elements = sum(x.size for x in ranks[0].values())
            bits = 8 * world.record.bytes_sent / elements / (1 + 1 / len(ranks))
        row = "".join(f" {error:13.2e}" for error in errors)
        print(f"{codec_name:32} {bits:6.2f}{row} {1000 * seconds:6.0f} ms")


if __name__ == "__main__":
    main()
