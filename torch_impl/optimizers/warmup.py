"""Learning rates of large batches for PyTorch."""

from __future__ import annotations

import torch
from torch.optim.lr_scheduler import LinearLR

from hvd_compress.optimizers.scaling import check_steps, rate_factor

from ..parameters import check_optimizer


def scaled_warmup(
    optimizer: torch.optim.Optimizer,
    *,
    batch_size: int,
    reference_batch_size: int,
    steps: int,
    scaling: str = "linear",
) -> LinearLR:
    """Raise the learning rates to those of a larger batch, and return the scheduler that does so::

        warmup = hvd.scaled_warmup(
            optimizer, batch_size=32 * hvd.size(), reference_batch_size=256, steps=5 * len(loader)
        )
        decay = MultiStepLR(optimizer, [n * len(loader) for n in (30, 60, 80)])
        scheduler = ChainedScheduler([warmup, decay])  # scheduler.step() after optimizer.step()

    Rates rise by equal increments in every step.  PyTorch's own schedulers do the rest; they
    multiply rates, and count from the first step.  The rate is outside of the velocity in
    ``torch.optim.SGD``, so momentum needs no correction.  A batch that is smaller than the
    reference gets its rate at once.

    Args:
        optimizer: with learning rates that suit ``reference_batch_size``; may be distributed.
        batch_size: examples of all ranks in one step.
        steps: that the warm-up takes; with a density that is warmed up, take as many for both.
        scaling: "linear" or "sqrt"; see ``hvd_compress.optimizers.rate_factor``.

    Reference: Goyal et al., 2017, arXiv 1706.02677.
    """
    check_optimizer(optimizer)
    factor = rate_factor(batch_size, reference_batch_size, scaling)
    check_steps(steps)
    for group in optimizer.param_groups:
        group["lr"] = factor * group["lr"]
        group.pop("initial_lr", None)  # of an earlier scheduler
    # Without steps its only factor is the last one, 1.
    start = min(1.0, 1 / factor) if steps else 1.0
    return LinearLR(optimizer, start, total_iters=steps)
