"""Train on real scans over MPI without Horovod, dense and with Deep Gradient Compression.

    python mpi_examples/train_digits_mpi.py
    python mpi_examples/train_digits_mpi.py --framework numpy
    mpirun -np 16 -H node1:8,node2:8 python mpi_examples/train_digits_mpi.py --compression dgc

What depends on the framework is in trainer_torch.py and trainer_numpy.py.
"""
# ruff: noqa: E402  A process that is no rank must not import MPI, which starts with it.

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
import time
import zlib
from pathlib import Path

import numpy as np
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from data import digit_arrays
from hvd_compress import Compressor, ConfigError, as_compressor, warmup_to
from hvd_compress.launch import under_mpirun
from report import Run, picture, table


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--framework", choices=["numpy", "torch"], default="torch")
    parser.add_argument(
        "--compression",
        nargs="+",
        default=["none", "dgc"],
        metavar="METHOD",
        help="methods to compare, such as none fp16 topk dgc:values=float16",
    )
    parser.add_argument(
        "--density", type=float, default=0.001, help="fraction of elements that dgc and topk send"
    )
    parser.add_argument(
        "--warmup-epochs",
        type=int,
        default=4,
        help="epochs in which the density falls and the learning rate rises",
    )
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=1, help="runs per method")
    parser.add_argument("--batch-size", type=int, default=16, help="per rank")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--ranks", type=int, default=4, help="when started without mpirun")
    parser.add_argument("--output", type=Path, default=Path("results/digits_mpi.png"))
    options = parser.parse_args()
    for name in ("epochs", "seeds", "batch_size", "ranks"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more")
    try:
        options.methods = {text: compressor(text, options) for text in options.compression}
    except ConfigError as error:
        parser.error(f"--compression or --density: {error}")
    return options


def compressor(text: str, options: argparse.Namespace) -> Compressor:
    """A method by name; top-k methods get the density of the command line and a warm-up to it."""
    method = as_compressor(text)
    if hasattr(method, "selection") and "density=" not in text:
        density = warmup_to(options.density, epochs=options.warmup_epochs)
        method = dataclasses.replace(method, density=density)
    return method


options = arguments()
under_mpirun(options.ranks)

from mpi4py import MPI

if options.framework == "torch":
    from trainer_torch import Trainer
else:
    from trainer_numpy import Trainer

world = MPI.COMM_WORLD


def train(method: str, seed: int, bar: tqdm) -> Run:
    """One run; the returned record means something on rank 0."""
    x, x_test, y, y_test = digit_arrays(seed)
    mean, std = x.mean(), x.std()
    x, x_test = (x - mean) / std, (x_test - mean) / std
    batches = len(x) // world.size // options.batch_size
    if not batches:
        raise SystemExit("no full batch for each rank: use a smaller --batch-size")

    trainer = Trainer(options.methods[method], seed)
    run = Run(method, seed)
    start = time.perf_counter()
    for epoch in range(options.epochs):
        trainer.set_epoch(epoch)  # the density of the warm-up goes by epochs
        order = np.random.default_rng([seed, epoch]).permutation(len(x))
        mine = order[world.rank :: world.size]
        for batch in mine[: batches * options.batch_size].reshape(batches, -1):
            lr = learning_rate(len(run.losses) / batches)
            run.losses.append(trainer.step(x[batch], y[batch], lr))
        if world.rank == 0:
            run.accuracies.append(trainer.accuracy(x_test, y_test))
            run.bytes_sent.append(trainer.stats().total.bytes_sent)
            bar.set_postfix_str(f"{method}, seed {seed}: {run.accuracies[-1]:.1%}")
            bar.update()
    run.seconds = time.perf_counter() - start
    run.steps = len(run.losses)
    run.dense_bytes = trainer.stats().total.dense_bytes
    digests = world.allgather([zlib.crc32(np.ascontiguousarray(w)) for w in trainer.weights()])
    if any(digest != digests[0] for digest in digests):
        raise SystemExit(f"{method}: the ranks' weights differ")
    return run


def learning_rate(epoch: float) -> float:
    """Up from a tenth during the warm-up, then down along a cosine."""
    warmup = options.warmup_epochs
    if epoch < warmup:
        return options.lr * (0.1 + 0.9 * epoch / warmup)
    return options.lr * (1 + math.cos(math.pi * (epoch - warmup) / (options.epochs - warmup))) / 2


def main() -> None:
    total = options.epochs * options.seeds * len(options.methods)
    bar = tqdm(total=total, unit="epoch", disable=world.rank != 0, ncols=90, mininterval=1)
    with logging_redirect_tqdm([logging.getLogger("hvd_compress")]):
        runs = [train(m, seed, bar) for seed in range(options.seeds) for m in options.methods]
    bar.close()
    if world.rank == 0:
        print(f"\n{options.framework}, {world.size} ranks, {options.epochs} epochs; ", end="")
        print("all ranks have the same weights, bit for bit\n")
        print(table(runs))
        if options.epochs <= options.warmup_epochs:
            print("The warm-up was not over: no epoch ran at the density that was asked for.")
        picture(runs, options.output)
        print(f"\npicture: {options.output.resolve()}")


if __name__ == "__main__":
    main()
