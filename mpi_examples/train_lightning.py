"""Train on real scans with Lightning's Trainer, in two processes, with compressed gradients.

torchrun --nproc-per-node 2 mpi_examples/train_lightning.py "topk:density=0.01"
"""

import sys

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits

from hvd_compress.torch.lightning import CompressedDDPStrategy

PLACE = {"accelerator": "cpu", "devices": 2, "default_root_dir": "results/lightning"}


class Network(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = torch.nn.Linear(64, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10)
        self.layers = torch.nn.Sequential(*layers)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.005)


pl.seed_everything(0)
images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
images = images.float() / 16
data = torch.utils.data.TensorDataset(images[:1500], labels[:1500])
batches = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
model, strategy = Network(), CompressedDDPStrategy(*(sys.argv[1:] or ["topk:density=0.01"]))
trainer = pl.Trainer(max_epochs=5, strategy=strategy, logger=False, **PLACE)
trainer.fit(model, batches)  # ckpt_path=... goes on from a checkpoint
if trainer.is_global_zero:
    accuracy = (model.layers(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
    print(f"test accuracy {accuracy:.1%}\n{strategy.compression.stats().line()}")
