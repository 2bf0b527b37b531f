"""Train a small transformer on real scans with Transformers' Trainer, with compressed gradients.

torchrun --nproc-per-node 2 mpi_examples/train_transformers.py "topk:density=0.05"
"""

import sys

import torch
from sklearn.datasets import load_digits
from transformers import TrainingArguments

from hvd_compress.torch.transformers import CompressedTrainer


class Network(torch.nn.Module):  # or one of Transformers' own
    def __init__(self) -> None:
        super().__init__()
        self.first, self.places = torch.nn.Linear(8, 64), torch.nn.Parameter(torch.zeros(8, 64))
        layer = torch.nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True)
        self.body, self.last = torch.nn.TransformerEncoder(layer, 2), torch.nn.Linear(512, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.last(self.body(self.first(x) + self.places).flatten(1))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
rows = images.float().view(-1, 8, 8) / 16  # the words of a text of eight
data = [{"x": x, "labels": y} for x, y in zip(rows, labels, strict=True)]
rates = {"per_device_train_batch_size": 16, "learning_rate": 0.002, "num_train_epochs": 5}
saving = {"output_dir": "results/transformers", "save_strategy": "epoch", "save_total_limit": 1}
arguments = TrainingArguments(use_cpu=True, report_to=[], **rates, **saving)
torch.manual_seed(0)
method = (sys.argv[1:] or ["topk:density=0.05"])[0]
trainer = CompressedTrainer(Network(), arguments, train_dataset=data[:1500], compression=method)
trainer.train()  # resume_from_checkpoint=True goes on from the last checkpoint
logits = torch.as_tensor(trainer.predict(data[1500:]).predictions)
if trainer.is_world_process_zero():
    accuracy = (logits.argmax(1) == labels[1500:]).float().mean().item()
    print(f"test accuracy {accuracy:.1%}\n{trainer.compression.stats().line()}")
