"""Train a convolutional network on real scans, dense and with Deep Gradient Compression.

    python mpi_examples/train_digits.py
    python mpi_examples/train_digits.py --compression dgc topk --density 0.01 --epochs 10
    python mpi_examples/train_digits.py --data-dir ~/cifar-10-batches-py --model resnet20
    horovodrun -np 16 -H node1:8,node2:8 python mpi_examples/train_digits.py

What turns data-parallel training with Horovod into compressed training is marked with (1) to (4).
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import time
from pathlib import Path

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from data import cifar10, digits
from hvd_compress import Compressor, ConfigError, as_compressor, warmup_to
from hvd_compress.launch import under_horovodrun
from models import MODELS
from report import Run, picture, table


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
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
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3, help="runs per method")
    parser.add_argument("--model", choices=sorted(MODELS), default="cnn")
    parser.add_argument("--data-dir", type=Path, help="CIFAR-10 in its usual files")
    parser.add_argument("--batch-size", type=int, default=16, help="per rank")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--ranks", type=int, default=4, help="when started without horovodrun")
    parser.add_argument(
        "--controller",
        choices=["gloo", "mpi"],
        default="mpi",
        help="when started without horovodrun",
    )
    parser.add_argument("--output", type=Path, default=Path("results/digits.png"))
    options = parser.parse_args()
    for name in ("epochs", "seeds", "batch_size", "ranks"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more")
    for method in options.compression:
        try:
            as_compressor(method)
        except ConfigError as error:
            parser.error(f"--compression {method}: {error}")
    return options


options = arguments()
under_horovodrun(options.ranks, options.controller)

# (1) Everything of horovod.torch, plus the compressors.
import hvd_compress.torch as hvd  # noqa: E402


def train(method: str, seed: int, bar: tqdm) -> Run:
    """One run; the returned record means something on rank 0."""
    torch.manual_seed(seed)
    train_set, test_set = cifar10(options.data_dir) if options.data_dir else digits(seed)
    sampler = DistributedSampler(train_set, hvd.size(), hvd.rank(), seed=seed, drop_last=True)
    loader = DataLoader(train_set, options.batch_size, sampler=sampler, drop_last=True)
    images, labels = train_set.tensors
    if not len(loader):
        raise SystemExit("no full batch for each rank: use a smaller --batch-size")
    model = MODELS[options.model](tuple(images.shape[1:]), int(labels.max()) + 1)

    optimizer = torch.optim.SGD(
        model.parameters(), lr=options.lr, momentum=0.9, weight_decay=1e-4, nesterov=True
    )
    # (2) The compressor takes the optimizer's momentum over and corrects it.
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compressor(method)
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    warmup, total = options.warmup_epochs * len(loader), options.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=max(warmup, 1)),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(total - warmup, 1)),
        ],
        milestones=[warmup],
    )

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
        if hvd.rank() == 0:
            run.accuracies.append(accuracy(model, test_set))
            # (4) Exact bytes, counted from the messages.
            run.bytes_sent.append(optimizer.compression.stats().total.bytes_sent)
            bar.set_postfix_str(f"{method}, seed {seed}: {run.accuracies[-1]:.1%}")
            bar.update()
    run.seconds = time.perf_counter() - start
    run.steps = len(run.losses)
    run.dense_bytes = optimizer.compression.stats().total.dense_bytes
    return run


def compressor(text: str) -> Compressor:
    """A method by name; top-k methods get the density of the command line and a warm-up to it."""
    method = as_compressor(text)
    if hasattr(method, "selection") and "density=" not in text:
        density = warmup_to(options.density, epochs=options.warmup_epochs)
        method = dataclasses.replace(method, density=density)
    return method


@torch.no_grad()
def accuracy(model: torch.nn.Module, dataset: TensorDataset) -> float:
    model.eval()
    right = sum((model(x).argmax(1) == y).sum().item() for x, y in DataLoader(dataset, 512))
    return right / len(dataset)


def main() -> None:
    hvd.init()
    total = options.epochs * options.seeds * len(options.compression)
    bar = tqdm(total=total, unit="epoch", disable=hvd.rank() != 0, ncols=90, mininterval=1)
    with logging_redirect_tqdm([logging.getLogger("hvd_compress")]):
        runs = [train(m, seed, bar) for seed in range(options.seeds) for m in options.compression]
    bar.close()
    if hvd.rank() == 0:
        where = "CIFAR-10" if options.data_dir else "scikit-learn's digits"
        print(f"\n{options.model} on {where}, {hvd.size()} ranks, {options.epochs} epochs\n")
        print(table(runs))
        if options.epochs <= options.warmup_epochs:
            print("The warm-up was not over: no epoch ran at the density that was asked for.")
        picture(runs, options.output)
        print(f"\npicture: {options.output.resolve()}")


if __name__ == "__main__":
    main()
