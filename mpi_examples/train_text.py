"""Train a language model on Python's own sources with PyTorch, dense and compressed.

    python -m mpi_examples.train_text
    python -m mpi_examples.train_text --compression none dgc topk --density 0.001 --seeds 3
    python -m mpi_examples.train_text --model transformer
    python -m mpi_examples.train_text --data ~/ptb --width 650 --dropout 0.5 --epochs 40
    horovodrun -np 16 -H node1:8,node2:8 python -m mpi_examples.train_text

``--data`` reads Penn Treebank from its usual files.  The lines that an LSTM needs beyond
train_digits.py are marked with (1) to (3)."""
# ruff: noqa: E402  A process that is no rank need not load Horovod.

from __future__ import annotations

import dataclasses
import functools
import math
import time

import numpy as np
import torch
from torch.nn import functional
from tqdm import tqdm

from hvd_compress.launch import under_horovodrun
from mpi_examples.data import (
    Corpus,
    columns,
    penn_treebank,
    ptb_folder,
    segments,
    standard_library,
)
from mpi_examples.demo import compare, horovod_parser, parse
from mpi_examples.models import TEXT_MODELS
from mpi_examples.report import PERPLEXITY, Run

parser = horovod_parser(__doc__, "results/text.png", epochs=5, seeds=1)
parser.add_argument("--model", choices=TEXT_MODELS, default="lstm")
parser.set_defaults(batch_size=8, density=0.01, lr=None, warmup_epochs=1)
parser.add_argument("--data", type=ptb_folder, help="Penn Treebank in its usual files")
parser.add_argument("--length", type=int, default=16, help="words between two steps")
parser.add_argument("--width", type=int, default=128, help="of every layer")
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--clip", type=float, default=0.25, help="the largest norm of a gradient")
options = parse(parser, partners=True)
if options.lr is None:
    options.lr = {"lstm": 8.0, "transformer": 1.0}[options.model]
under_horovodrun(options.ranks, options.controller)

import hvd_compress.torch as hvd
from mpi_examples.optimizers import local_optimizer, warmup_and_cosine


@functools.cache
def corpus() -> Corpus:
    return penn_treebank(options.data) if options.data else standard_library()


def train(method: str, seed: int, bar: tqdm) -> Run:
    """One run; the returned record means something on rank 0."""
    torch.manual_seed(seed)
    text = corpus()
    model = TEXT_MODELS[options.model](text.words, options.width, options.length, options.dropout)
    optimizer, compression = local_optimizer(model, method, options)
    # (1) DGC clips each rank's gradient before it adds that to what was not sent.  With the other
    # methods the mean gradient is clipped, but not with Adam, whose steps do not grow with it.
    clip_mean = options.methods[method].partner is None
    if hasattr(compression, "clip_norm"):
        compression = dataclasses.replace(compression, clip_norm=options.clip)
        clip_mean = False
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    steps = len(batches(text.train))
    schedule = warmup_and_cosine(optimizer, options, steps)

    run = Run(method, seed, PERPLEXITY)
    start = time.perf_counter()
    for epoch in range(options.epochs):
        model.train()
        shift = np.random.default_rng([seed, epoch]).integers(len(text.train))
        state = None
        for step, (words, following) in enumerate(batches(np.roll(text.train, shift))):
            # (2) The warm-up is short: its density falls within epochs, too.
            optimizer.compression.set_epoch(epoch + step / steps)
            optimizer.zero_grad()
            logits, state = model(words, state)
            loss = functional.cross_entropy(logits.flatten(0, 1), following.flatten())
            loss.backward()
            if clip_mean:  # (3) As with Horovod alone.
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
            schedule.step()
            run.losses.append(loss.item())
        if hasattr(optimizer, "synchronize_parameters"):  # with 0/1 Adam they may differ
            optimizer.synchronize_parameters()
        run.end_epoch(perplexity(model, text.valid), optimizer.compression.stats(), bar)
    run.seconds = time.perf_counter() - start
    run.test = perplexity(model, text.test)
    return run


def batches(text: np.ndarray) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's."""
    part = columns(text, options.batch_size, hvd.rank(), hvd.size())
    return list(segments(part, options.length))


@torch.no_grad()
def perplexity(model: torch.nn.Module, text: np.ndarray) -> float:
    """The batches of the whole text; every rank reads its part."""
    model.eval()
    total, words, state = 0.0, 0, None
    for word, following in batches(text):
        logits, state = model(word, state)
        loss = functional.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum")
        total, words = total + loss.item(), words + following.numel()
    mean = hvd.allreduce(torch.tensor([total / words], dtype=torch.float64), name="perplexity")
    return math.exp(mean.item())


if __name__ == "__main__":
    hvd.init()
    where = "Penn Treebank" if options.data else "Python's standard library"
    title = f"{options.model} on {where}, {hvd.size()} ranks, {options.epochs} epochs"
    compare(train, options, hvd.rank(), title)
