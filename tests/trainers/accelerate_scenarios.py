"""Accelerate."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration

from hvd_compress.torch import DDPState, ddp_hook
from tests import group_worker
from tests.trainers import common


class _Run:
    def __init__(self, method=common.METHOD, *, batch=16, accumulate=1, residuals="ranks"):
        # A batch of the loader is one of all ranks together, in the order of the images.
        whole = DataLoaderConfiguration(split_batches=True)
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=accumulate, dataloader_config=whole
        )
        model = common.network()
        data = torch.utils.data.TensorDataset(*common.images())
        self.model, self.optimizer, self.batches = self.accelerator.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            torch.utils.data.DataLoader(data, batch_size=batch),
        )
        self.state = DDPState(method, self.model, residuals=residuals)
        self.model.register_comm_hook(self.state, ddp_hook)
        self.accelerator.register_for_checkpointing(self.state)

    def epoch(self, clip=None):
        norms = []
        for x, y in self.batches:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(common.loss_of(self.model, x, y))
                if clip and self.accelerator.sync_gradients:
                    parameters = self.model.parameters()
                    norms.append(self.accelerator.clip_grad_norm_(parameters, clip).item())
                self.optimizer.step()
                self.optimizer.zero_grad()
        group_worker.assert_same_everywhere(self.model)
        return norms


def it_compresses() -> None:
    run = _Run()
    run.epoch()
    common.assert_compressed(run.state, 8)


def a_checkpoint_goes_on_with_the_same_bits() -> None:
    whole, first, again = _Run(), _Run(), _Run()
    for _ in range(2):
        whole.epoch()
    first.epoch()
    first.accelerator.save_state("half")
    first.accelerator.wait_for_everyone()  # until rank 0 has written
    again.accelerator.load_state("half")
    again.epoch()
    group_worker.assert_equal(again.model, whole.model)
    common.assert_same_states(again.state, whole.state)


def a_checkpoint_may_have_the_mean() -> None:
    first, again = _Run(residuals="mean"), _Run(residuals="mean")
    first.epoch()
    first.accelerator.save_state("mean")
    first.accelerator.wait_for_everyone()  # until rank 0 has written
    again.accelerator.load_state("mean")
    total = first.state.reducer.store.states["0.weight"]["residual"].clone()
    torch.distributed.all_reduce(total)
    mean = again.state.reducer.store.states["0.weight"]["residual"]
    torch.testing.assert_close(mean.view(-1) * 2, total.view(-1))


def accumulated_gradients_are_exchanged_once() -> None:
    """Both passes together are one of twice the batch."""
    run = _Run(accumulate=2)
    run.epoch()
    common.assert_compressed(run.state, 4)
    models = []
    for options in ({"accumulate": 2}, {"batch": 32}):  # which all accelerators share
        run = _Run("none", **options)
        run.epoch()
        models.append(run.model)
    group_worker.assert_close(*models)


def clipping_is_of_the_average() -> None:
    """Its norm is the same on all ranks."""
    norms = torch.tensor(_Run().epoch(clip=0.05))
    theirs = norms.clone()
    torch.distributed.broadcast(theirs, 0)
    assert torch.equal(norms, theirs)
    assert len(norms) == 8
    assert norms.max() > 0.05
