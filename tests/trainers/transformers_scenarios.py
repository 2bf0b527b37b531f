"""Transformers' Trainer."""

from __future__ import annotations

import functools

import pytest
import torch
import transformers
from transformers import Trainer, TrainerCallback, TrainingArguments

from hvd_compress.errors import ConfigError
from hvd_compress.torch import DGC, StagedWarmup
from hvd_compress.torch.transformers import FILE, CompressedGradients, CompressedTrainer
from tests import group_worker
from tests.trainers import common

transformers.logging.set_verbosity_error()


class _Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = common.network()

    def forward(self, x, labels=None):
        return {"loss": common.loss_of(self.layers, x, labels)}


@functools.cache
def _data():
    return [{"x": x, "labels": y} for x, y in zip(*common.images(), strict=True)]


def _trainer(epochs=2, *, batch=16, compression=common.METHOD, kind=CompressedTrainer, **options):
    arguments = TrainingArguments(
        output_dir=options.pop("folder", "out"),
        use_cpu=True,
        num_train_epochs=epochs,
        per_device_train_batch_size=batch,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        disable_tqdm=True,
        report_to=[],
        **{"save_strategy": "no", "logging_strategy": "no", **options},
    )
    more = {"residuals": "ranks"} if compression == common.METHOD else {}
    return kind(_Network(), arguments, train_dataset=_data(), compression=compression, **more)


def it_compresses() -> None:
    trainer = _trainer()
    trainer.train()
    group_worker.assert_same_everywhere(trainer.model)
    common.assert_compressed(trainer.compression, 8)


def a_checkpoint_goes_on_with_the_same_bits() -> None:
    whole, first = (
        _trainer(epochs, folder="half", save_strategy=when)
        for epochs, when in ((2, "no"), (1, "epoch"))
    )
    for each in (whole, first):
        each.train()
    again = _trainer(folder="half")
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 8
    group_worker.assert_equal(again.model, whole.model)
    common.assert_same_states(again.compression, whole.compression)
    named = _trainer(folder="elsewhere")
    named.train(resume_from_checkpoint="half/checkpoint-4")
    group_worker.assert_equal(named.model, whole.model)


def a_checkpoint_may_have_the_mean() -> None:
    first = _trainer(1, compression="topk:density=0.050", folder="mean", save_strategy="epoch")
    first.train()
    saved = torch.load(f"mean/checkpoint-4/{FILE}", weights_only=True)
    name = max(saved["states"])
    total = first.compression.reducer.store.states[name]["residual"].clone()
    torch.distributed.all_reduce(total)
    torch.testing.assert_close(saved["states"][name]["residual"].view(-1) * 2, total.view(-1))


def accumulated_gradients_are_exchanged_once() -> None:
    twice = _trainer(1, batch=8, gradient_accumulation_steps=2)
    twice.train()
    common.assert_compressed(twice.compression, 4)


class _Norms(TrainerCallback):
    def __init__(self):
        self.found = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        parameters = [p.grad.view(-1) for p in model.parameters() if p.grad is not None]
        self.found.append(torch.cat(parameters).norm().item())


def clipping_is_of_the_average() -> None:
    trainer, norms = _trainer(1, max_grad_norm=0.05), _Norms()
    trainer.add_callback(norms)
    trainer.train()
    assert norms.found == pytest.approx([0.05] * 4, rel=1e-3)
    group_worker.assert_same_everywhere(trainer.model)


def schedules_follow_the_epochs() -> None:
    method = DGC(density=StagedWarmup("epoch", 1, (0.5, 0.05)), momentum=0.0, min_size=0)
    trainer = _trainer(compression=method, optim="sgd")
    trainer.train()
    assert trainer.compression.reducer.epoch == 1


def a_trainer_of_ones_own_has_it_too() -> None:
    class Own(Trainer):
        def training_step(self, *arguments, **options):
            self.has_trained = True
            return super().training_step(*arguments, **options)

    class Compressed(CompressedGradients, Own):
        pass

    trainer = _trainer(1, kind=Compressed)
    trainer.train()
    assert trainer.has_trained
    common.assert_compressed(trainer.compression, 4)


def a_loss_scale_that_changes_is_refused() -> None:
    trainer = _trainer(1)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ConfigError, match="bf16=True"):
        trainer.train()
