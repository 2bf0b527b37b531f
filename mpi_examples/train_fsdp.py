"""Train on real scans a model that FSDP2 divides among all ranks, with compressed collectives, in
a loop as torchtitan has it: init on "meta", blocks compiled, a distributed checkpoint.

torchrun --nproc-per-node 4 mpi_examples/train_fsdp.py "linear:bits=4"
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch.distributed.fsdp import fully_shard

import hvd_compress.torch as hvd

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group()
with torch.device("meta"):
    layers = [torch.nn.Linear(64, 512), torch.nn.Linear(512, 512), torch.nn.Linear(512, 10)]
    model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
for part in (*layers, model):
    part.compile(backend="aot_eager")  # without a backend: faster, and half a minute to compile
    fully_shard(part)
exchange = hvd.compress_shards(model, *(sys.argv[1:] or ["linear"]), parameters="linear")
model.to_empty(device=device)
torch.manual_seed(0)
for layer in layers:
    layer.reset_parameters()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
x, y = (torch.as_tensor(a, device=device) for a in load_digits(return_X_y=True))
x, batches = x.float() / 16, torch.Generator().manual_seed(dist.get_rank())
for _ in range(101):
    batch = torch.randint(1500, (32,), generator=batches)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
dcp.save({"model": model.state_dict(), "exchange": exchange}, checkpoint_id="results/fsdp")
accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean().item()
if dist.get_rank() == 0:
    print(f"test accuracy {accuracy:.1%}\n{exchange.stats().line()}")
dist.destroy_process_group()
