"""Lightning's Trainer."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from hvd_compress.errors import ConfigError
from hvd_compress.torch import DGC, StagedWarmup
from hvd_compress.torch.lightning import KEY, CompressedDDPStrategy
from tests import group_worker
from tests.trainers import common


class _Module(pl.LightningModule):
    def __init__(self, momentum=0.9):
        super().__init__()
        self.network, self.momentum = common.network(), momentum
        self.norms = []

    def training_step(self, batch, _):
        return common.loss_of(self.network, *batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=self.momentum)

    def on_train_batch_end(self, *_):  # after the step
        self.norms.append(torch.cat([p.grad.view(-1) for p in self.parameters()]).norm().item())


def _loader(batch=16):
    data = torch.utils.data.TensorDataset(*common.images())
    return torch.utils.data.DataLoader(data, batch_size=batch, shuffle=True)


def _fit(epochs, *, strategy=None, batch=16, module=None, checkpoint=None, **options):
    strategy = strategy or CompressedDDPStrategy(common.METHOD, residuals="ranks")
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=epochs,
        strategy=strategy,
        **dict.fromkeys(quiet, False),
        **options,
    )
    pl.seed_everything(0, verbose=False)
    module = module or _Module()
    trainer.fit(module, _loader(batch), ckpt_path=checkpoint)
    group_worker.assert_same_everywhere(module)
    return trainer, module


def it_compresses_without_a_gpu() -> None:
    trainer, _ = _fit(2)
    assert trainer.global_step == 8
    common.assert_compressed(trainer.strategy.compression, 8)
    assert "network.0.weight" in trainer.strategy.compression.stats().layers


def a_checkpoint_goes_on_with_the_same_bits() -> None:
    whole, expected = _fit(2)
    first, _ = _fit(1)
    first.save_checkpoint("half.ckpt")
    again, found = _fit(2, checkpoint="half.ckpt")
    group_worker.assert_equal(found, expected)
    common.assert_same_states(again.strategy.compression, whole.strategy.compression)
    first.save_checkpoint("weights.ckpt", weights_only=True)
    assert KEY not in torch.load("weights.ckpt", weights_only=False)


def a_checkpoint_may_have_the_mean() -> None:
    first, _ = _fit(1, strategy=CompressedDDPStrategy(common.METHOD))
    first.save_checkpoint("mean.ckpt")
    saved = torch.load("mean.ckpt", weights_only=False)[KEY]
    own = first.strategy.compression.state_dict(consolidate=False)
    total = own["states"]["network.0.weight"]["residual"].clone()
    torch.distributed.all_reduce(total)
    torch.testing.assert_close(saved["states"]["network.0.weight"]["residual"] * 2, total)
    again, _ = _fit(2, strategy=CompressedDDPStrategy(common.METHOD), checkpoint="mean.ckpt")
    assert again.strategy.compression.reducer.step == 8


def a_second_fit_keeps_what_waits() -> None:
    trainer, module = _fit(1)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, _loader())
    common.assert_compressed(trainer.strategy.compression, 8)


def accumulated_gradients_are_exchanged_once() -> None:
    """Two batches of eight are one of sixteen: in order, so that the batches are the same."""
    trainer, found = _fit(1, batch=8, accumulate_grad_batches=2)
    common.assert_compressed(trainer.strategy.compression, 4)
    _, expected = _fit(1, batch=16)
    group_worker.assert_close(found, expected)


def clipping_is_of_the_average() -> None:
    _, module = _fit(1, gradient_clip_val=0.05)
    assert module.norms == pytest.approx([0.05] * 4, rel=1e-3)


def schedules_follow_the_epochs() -> None:
    method = DGC(density=StagedWarmup("epoch", 1, (0.5, 0.05)), momentum=0.9, min_size=0)
    sent = []
    for epochs in (1, 2):
        trainer, _ = _fit(epochs, strategy=CompressedDDPStrategy(method), module=_Module(0.0))
        sent.append(trainer.strategy.compression.stats().total.bytes_sent)
    assert trainer.strategy.compression.reducer.epoch == 1
    assert sent[1] < 1.5 * sent[0]


def a_loss_scale_that_changes_is_refused() -> None:
    scaled = {"plugins": [MixedPrecision("16-mixed", "cpu")]}
    with pytest.raises(ConfigError, match="bf16-mixed"):
        _fit(1, **scaled)
