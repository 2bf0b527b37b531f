"""Train on real scans over MPI without Horovod, dense and with Deep Gradient Compression.

    python -m mpi_examples.train_digits_mpi
    python -m mpi_examples.train_digits_mpi --framework numpy
    mpirun -np 16 -H node1:8,node2:8 python -m mpi_examples.train_digits_mpi --compression dgc

The model and its optimizer are in trainer_torch.py and trainer_numpy.py.
"""
# ruff: noqa: E402  A process that is no rank must not import MPI, which starts with it.

from __future__ import annotations

import time
import zlib

import numpy as np
from tqdm import tqdm

from hvd_compress.launch import under_mpirun
from mpi_examples.data import digits, share
from mpi_examples.demo import compare, parse, parser_of, rate_of
from mpi_examples.report import Run
from mpi_examples.study import warmed_up

parser = parser_of(__doc__, "results/digits_mpi.png", epochs=15, seeds=1)
parser.add_argument("--framework", choices=["numpy", "torch"], default="torch")
options = parse(parser)
under_mpirun(options.ranks)

from mpi4py import MPI

if options.framework == "torch":
    from mpi_examples.trainer_torch import Trainer
else:
    from mpi_examples.trainer_numpy import Trainer

world = MPI.COMM_WORLD


def train(method: str, seed: int, bar: tqdm) -> Run:
    """One run; the returned record means something on rank 0."""
    x, x_test, y, y_test = digits(seed)
    trainer = Trainer(options.methods[method], seed)
    run = Run(method, seed)
    for epoch in range(options.epochs):
        trainer.set_epoch(epoch)  # the density of the warm-up goes by epochs
        batches = share(len(x), seed, epoch, world.rank, world.size, options.batch_size)
        start = time.perf_counter()
        for step, batch in enumerate(batches):
            done = (epoch + step / len(batches)) / options.epochs
            lr = options.lr * warmed_up(done, options.warmup_epochs / options.epochs)
            run.losses.append(trainer.step(x[batch], y[batch], lr * rate_of(method)))
        run.seconds += time.perf_counter() - start
        if world.rank == 0:
            run.elapsed.append(run.seconds)
            run.end_epoch(100 * trainer.accuracy(x_test, y_test), trainer.stats(), bar)
    digests = world.allgather([zlib.crc32(np.ascontiguousarray(w)) for w in trainer.weights()])
    if any(digest != digests[0] for digest in digests):
        raise SystemExit(f"{method}: the ranks' weights differ")
    return run


if __name__ == "__main__":
    title = f"{options.framework}, {world.size} ranks, {options.epochs} epochs; all ranks have the "
    compare(train, options, world.rank, title + "same weights, bit for bit")
