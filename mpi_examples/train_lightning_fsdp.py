"""Train on real scans with Lightning's ModelParallelStrategy: FSDP2 over two processes, with
compressed collectives.

torchrun --nproc-per-node 2 mpi_examples/train_lightning_fsdp.py "linear:bits=4"
"""

import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from sklearn.datasets import load_digits
from torch.distributed.fsdp import fully_shard

import hvd_compress.torch as hvd

PLACE = {"accelerator": "cpu", "devices": 2, "default_root_dir": "results/lightning_fsdp"}


class Network(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = torch.nn.Linear(64, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10)
        self.layers = torch.nn.Sequential(*layers)

    def configure_model(self) -> None:
        fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])
        self.exchange = hvd.compress_shards(self.layers, *(sys.argv[1:] or ["linear"]))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.005)


pl.seed_everything(0)
images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
images = images.float() / 16
data = torch.utils.data.TensorDataset(images[:1500], labels[:1500])
batches = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
model, strategy = Network(), ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
trainer = pl.Trainer(max_epochs=5, strategy=strategy, logger=False, **PLACE)
trainer.fit(model, batches)
accuracy = (model.layers(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
if trainer.is_global_zero:
    print(f"test accuracy {accuracy:.1%}\n{model.exchange.stats().line()}")
