"""Train a convolutional network on real scans with PyTorch, dense and compressed.

    python -m mpi_examples.train_digits
    python -m mpi_examples.train_digits --compression dgc topk --density 0.01 --epochs 10
    horovodrun -np 16 -H node1:8,node2:8 python -m mpi_examples.train_digits

The lines that turn data-parallel training with Horovod into compressed training are marked with (1)
to (4)."""
# ruff: noqa: E402  A process that is no rank need not load Horovod.

from __future__ import annotations

import time

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

from hvd_compress.launch import under_horovodrun
from mpi_examples.data import digits
from mpi_examples.demo import compare, horovod_parser, parse
from mpi_examples.models import accuracy, cnn
from mpi_examples.report import Run

parser = horovod_parser(__doc__, "results/digits.png", epochs=30, seeds=3)
options = parse(parser, partners=True)
under_horovodrun(options.ranks, options.controller)

# (1) Everything of horovod.torch, plus the compressors.
import hvd_compress.torch as hvd
from mpi_examples.optimizers import local_optimizer, warmup_and_cosine


def train(method: str, seed: int, bar: tqdm) -> Run:
    """One run; the returned record means something on rank 0."""
    torch.manual_seed(seed)
    x_train, x_test, y_train, y_test = map(torch.from_numpy, digits(seed))
    train_set = TensorDataset(x_train, y_train)
    sampler = DistributedSampler(train_set, hvd.size(), hvd.rank(), seed=seed, drop_last=True)
    loader = DataLoader(train_set, options.batch_size, sampler=sampler, drop_last=True)
    if not len(loader):
        raise SystemExit("no full batch for each rank: use a smaller --batch-size")
    model = cnn((1, 8, 8), 10)

    # (2) The compressor takes the optimizer's momentum over and corrects it.
    optimizer, compression = local_optimizer(model, method, options, weight_decay=1e-4)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    schedule = warmup_and_cosine(optimizer, options, len(loader))

    run = Run(method, seed)
    start = time.perf_counter()
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        # (3) The density of the warm-up goes by epochs.
        optimizer.compression.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            schedule.step()
            run.losses.append(loss.item())
        if hasattr(optimizer, "synchronize_parameters"):  # with 0/1 Adam they may differ
            optimizer.synchronize_parameters()
        if hvd.rank() == 0:
            # (4) Exact bytes, counted from the messages.
            run.end_epoch(accuracy(model, x_test, y_test), optimizer.compression.stats(), bar)
    run.seconds = time.perf_counter() - start
    return run


if __name__ == "__main__":
    hvd.init()
    title = f"scikit-learn's digits, {hvd.size()} ranks, {options.epochs} epochs"
    compare(train, options, hvd.rank(), title)
