"""Train on real scans with Accelerate's FSDP2, in two processes, with compressed collectives.

torchrun --nproc-per-node 2 mpi_examples/train_accelerate_fsdp.py "linear:bits=4"
"""

import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from sklearn.datasets import load_digits

import hvd_compress.torch as hvd

plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
accelerator = Accelerator(cpu=not torch.cuda.is_available(), fsdp_plugin=plugin)
torch.manual_seed(0)
images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
images = images.float() / 16
data = torch.utils.data.TensorDataset(images[:1500], labels[:1500])
batches = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
layers = torch.nn.Linear(64, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10)
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
exchange = hvd.compress_shards(model, *(sys.argv[1:] or ["linear"]))  # this line is new
for _ in range(5):
    for x, y in batches:
        accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
images, labels = images.to(accelerator.device), labels.to(accelerator.device)
accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
if accelerator.is_main_process:
    print(f"test accuracy {accuracy:.1%}\n{exchange.stats().line()}")
accelerator.end_training()
