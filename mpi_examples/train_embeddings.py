"""Train word embeddings, whose gradients are rows, with the ways to send rows.

    python -m mpi_examples.train_embeddings
    python -m mpi_examples.train_embeddings --rows whole int8 top:0.1:int8 --steps 1000
    mpirun -np 2 python -m mpi_examples.train_embeddings

Skip-gram with negative sampling (Mikolov et al., 2013): a word's vector shall tell its neighbours
in the text from words that are drawn.  The text is Python's standard library.  The table has the
loss on other text by each way to send rows, and what a rank sends in a step.
"""
# ruff: noqa: E402  A process that is no rank must not import MPI, which starts with it.

from __future__ import annotations

import argparse
import functools
import math
import statistics

from hvd_compress import NoCompression
from hvd_compress.cli.options import positive
from hvd_compress.launch import under_mpirun
from mpi_examples.study import Run, each_run, size, spread, study_parser, table

#: ways to send rows
ROWS = ("whole", "float16", "int8", "top:0.1", "top:0.1:int8")
#: words that are known, numbers of a word, and words drawn for each pair
WORDS, WIDTH, NEGATIVES = 5000, 64, 5
#: words on each side of a word that are its neighbours
WINDOW = 4


def arguments() -> argparse.Namespace:
    parser = study_parser(__doc__, lr=0.2)  # for a sum over the pairs of a batch
    parser.set_defaults(ranks=2, batch_size=256)
    parser.add_argument("--rows", nargs="+", default=ROWS, metavar="ROWS", help="how to send them")
    parser.add_argument("--steps", type=positive, default=200)
    options = parser.parse_args()
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
from mpi_examples.data import standard_library

world = MPI.COMM_WORLD


class Words(torch.nn.Module):
    """Vectors of words, and of words as neighbours of others."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.own = torch.nn.Embedding(words, WIDTH, sparse=True)
        self.neighbour = torch.nn.Embedding(words, WIDTH, sparse=True)
        torch.nn.init.uniform_(self.own.weight, -0.5 / WIDTH, 0.5 / WIDTH)
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
        drawn = np.searchsorted(self.ends, random.random((batch, NEGATIVES)))
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
    corpus = standard_library(WORDS)
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
    sent = statistics.mean(world.allgather(optimizer.compression.stats().total.bytes_sent))
    return {"test loss": loss, "sent per step": sent / options.steps}


COLUMNS = {
    "test loss": lambda losses: spread(losses, 3),
    "sent per step": size,
}

if __name__ == "__main__":
    hvd.init()
    runs = each_run(options.rows, options.seeds, train, world.rank)
    if world.rank == 0:
        print(f"\n{world.size} ranks, {options.steps} steps, {options.seeds} seeds\n")
        print(table(runs, COLUMNS, "rows"))
