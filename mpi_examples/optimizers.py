"""The arguments of the PyTorch examples for ``hvd.DistributedOptimizer``, and how the learning rate
goes.

Only ranks import this: it imports Horovod.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

import hvd_compress.torch as hvd
from hvd_compress import Compressor
from mpi_examples.demo import PARTNERS, rate_of


def local_optimizer(
    model: torch.nn.Module, method: str, options: argparse.Namespace, **sgd: Any
) -> tuple[torch.optim.Optimizer, Compressor]:
    """SGD with Nesterov momentum (and the options ``sgd``) and the method; or the optimizer that
    the method is a part of, and its compressor."""
    compression = options.methods[method]
    if compression.partner is None:
        lr = options.lr * rate_of(method)
        made = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True, **sgd)
        return made, compression
    make = getattr(hvd, compression.partner)  # 1-bit Adam and the like
    optimizer = make(model.parameters(), **PARTNERS[compression.partner])
    return optimizer, optimizer.compressor()


def warmup_and_cosine(
    optimizer: torch.optim.Optimizer, options: argparse.Namespace, steps_an_epoch: int
) -> LRScheduler:
    """Up from a tenth during the warm-up, then down along a cosine; one step of it for each of the
    optimizer's."""
    warmup, total = options.warmup_epochs * steps_an_epoch, options.epochs * steps_an_epoch
    rising = LinearLR(optimizer, 0.1, total_iters=max(warmup, 1))
    falling = CosineAnnealingLR(optimizer, max(total - warmup, 1))
    return SequentialLR(optimizer, [rising, falling], milestones=[warmup])
