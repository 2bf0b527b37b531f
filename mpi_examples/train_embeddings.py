"""Train word embeddings, whose gradients are rows, with the ways to send rows.

    python -m mpi_examples.train_embeddings
    python -m mpi_examples.train_embeddings --rows whole int8 top:0.1:int8 --steps 1000
    mpirun -np 2 python -m mpi_examples.train_embeddings

Skip-gram with negative sampling (Mikolov et al., 2013): a word's vector shall tell its neighbours
in the text from words that are drawn.  The text is Python's standard library.  Of each way to send
rows the table has the loss on other text, and what a rank sends in a step.
"""
# ruff: noqa: E402  A process that is no rank must not import MPI, which starts with it.

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import statistics

from hvd_compress import NoCompression
from hvd_compress.cli.options import parser_of
from hvd_compress.cli.tables import text_table
from hvd_compress.integrations.launch import under_mpirun
from hvd_compress.stats import human_bytes
from mpi_examples.study import check_counts, each_run, spread

ROWS = ("whole", "float16", "int8", "top:0.1", "top:0.1:int8")


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", nargs="+", default=ROWS, metavar="ROWS", help="how to send them")
    parser.add_argument("--words", type=int, default=5000, help="that are known")
    parser.add_argument("--width", type=int, default=64, help="numbers of a word")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3, help="runs per way")
    parser.add_argument("--batch-size", type=int, default=256, help="pairs of words per rank")
    parser.add_argument("--negatives", type=int, default=5, help="words drawn for each pair")
    parser.add_argument("--lr", type=float, default=0.2, help="for a sum over the pairs of a batch")
    parser.add_argument("--ranks", type=int, default=2, help="when started without mpirun")
    options = parser.parse_args()
    counts = ("words", "width", "steps", "seeds", "batch_size", "negatives", "ranks")
    check_counts(parser, options, *counts)
    for text in options.rows:
        NoCompression(rows=text)  # checks it
    return options


options = arguments()
under_mpirun(options.ranks)

import numpy as np
import torch
from mpi4py import MPI
from torch.nn import functional

import hvd_compress.torch.mpi as hvd
from mpi_examples.data_text import standard_library

world = MPI.COMM_WORLD
#: words on each side of a word that are its neighbours
WINDOW = 4


@dataclasses.dataclass
class Run:
    loss: float
    sent: float
    dense: float


class Words(torch.nn.Module):
    """Vectors of words, and of words as neighbours of others."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.own = torch.nn.Embedding(words, options.width, sparse=True)
        self.neighbour = torch.nn.Embedding(words, options.width, sparse=True)
        torch.nn.init.uniform_(self.own.weight, -0.5 / options.width, 0.5 / options.width)
        torch.nn.init.zeros_(self.neighbour.weight)

    def forward(self, words: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """Logits for words of shape (batch,) and ``others`` of shape (batch, several)."""
        return (self.neighbour(others) @ self.own(words)[:, :, None])[:, :, 0]


class Pairs:
    """Draws words, a neighbour of each, and words that are none; rare words more often than their
    share of the text (its power of 3/4)."""

    def __init__(self, text: np.ndarray, words: int) -> None:
        self.text = text
        counts = np.bincount(text, minlength=words) ** 0.75
        self.ends = np.cumsum(counts / counts.sum())
        frequency = np.bincount(text, minlength=words) / len(text)
        kept = np.minimum(1, np.sqrt(1e-3 / np.maximum(frequency, 1e-9)))[text]
        kept[:WINDOW] = kept[-WINDOW:] = 0
        self.places = np.cumsum(kept / kept.sum())

    def draw(self, random: np.random.Generator, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        places = np.searchsorted(self.places, random.random(batch)).clip(max=len(self.text) - 5)
        distance = random.integers(1, WINDOW + 1, batch) * random.choice([-1, 1], batch)
        drawn = np.searchsorted(self.ends, random.random((batch, options.negatives)))
        others = np.concatenate([self.text[places + distance][:, None], drawn], 1)
        others = others.clip(max=len(self.ends) - 1)
        return torch.from_numpy(self.text[places]), torch.from_numpy(others)


def loss_of(model: Words, words: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """The sum over the batch; the first of the others is the neighbour."""
    logits = model(words, others)
    return -functional.logsigmoid(logits[:, 0]).sum() - functional.logsigmoid(-logits[:, 1:]).sum()


@functools.cache
def texts() -> tuple[Pairs, Pairs, int]:
    """To train on and to test with, and the number of words."""
    corpus = standard_library(options.words)
    return Pairs(corpus.train, corpus.words), Pairs(corpus.test, corpus.words), corpus.words


def train(rows: str, seed: int) -> Run:
    """One run; the returned record means something on rank 0."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    pairs, unseen, known = texts()
    model = Words(known)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=options.lr),
        named_parameters=model.named_parameters(),
        compression=NoCompression(rows=rows),
    )
    random = np.random.default_rng([seed, world.rank])
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = options.lr * (1 - step / options.steps)
        optimizer.zero_grad()
        loss_of(model, *pairs.draw(random, options.batch_size)).backward()
        optimizer.step()
    loss, batch = math.nan, 10_000
    if world.rank == 0:
        with torch.no_grad():
            loss = loss_of(model, *unseen.draw(np.random.default_rng(0), batch)).item() / batch
    total = optimizer.compression.stats().total
    sent = statistics.mean(world.allgather(total.bytes_sent)) / options.steps
    return Run(loss, sent, total.dense_bytes / options.steps)


def table(runs: dict[str, list[Run]]) -> str:
    """One row for each way to send rows."""
    lines = []
    first = statistics.mean(run.sent for run in next(iter(runs.values())))
    for rows, group in runs.items():
        sent = statistics.mean(run.sent for run in group)
        loss = spread([run.loss for run in group], 3)
        lines.append((rows, loss, human_bytes(sent), f"{first / sent:.1f}x"))
    return text_table(("rows", "test loss", "sent a step", "ratio"), lines)


if __name__ == "__main__":
    hvd.init()
    runs = each_run(options.rows, options.seeds, train, world.rank)
    if world.rank == 0:
        print(f"\n{world.size} ranks, {options.steps} steps, {options.seeds} seeds")
        dense = human_bytes(runs[options.rows[0]][0].dense)
        print(f"the tables as dense gradients: {dense} a step\n")
        print(table(runs))
