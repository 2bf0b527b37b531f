"""Train a small transformer on real scans with Transformers' Trainer and FSDP2, in two processes,
with compressed collectives.

torchrun --nproc-per-node 2 mpi_examples/train_transformers_fsdp.py "linear:bits=4"
"""

import sys

import torch
from sklearn.datasets import load_digits
from transformers import Trainer, TrainerCallback, TrainingArguments

import hvd_compress.torch as hvd


class Network(torch.nn.Module):  # or one of Transformers' own
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(64, 1024), torch.nn.Linear(1024, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.last(self.first(x).relu())
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Compressed(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **_):  # when it is sharded
        self.exchange = hvd.compress_shards(model, *(sys.argv[1:] or ["linear"]))


images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
data = [{"x": x, "labels": y} for x, y in zip(images.float() / 16, labels, strict=True)]
rates = {"per_device_train_batch_size": 16, "learning_rate": 0.005, "num_train_epochs": 5}
sharding = {"fsdp": True, "fsdp_config": {"version": 2, "auto_wrap_policy": "NO_WRAP"}}
others = {"use_cpu": not torch.cuda.is_available(), "report_to": [], "save_strategy": "no"}
arguments = TrainingArguments("results/transformers_fsdp", **rates, **others, **sharding)
torch.manual_seed(0)
compressed = Compressed()
trainer = Trainer(Network(), arguments, train_dataset=data[:1500], callbacks=[compressed])
trainer.train()
logits = torch.as_tensor(trainer.predict(data[1500:]).predictions)
if trainer.is_world_process_zero():
    accuracy = (logits.argmax(1) == labels[1500:]).float().mean().item()
    print(f"test accuracy {accuracy:.1%}\n{compressed.exchange.stats().line()}")
