"""Train on real scans a model that FSDP2 shards inside nodes, with compression between nodes.

torchrun --nproc-per-node 4 mpi_examples/train_hsdp.py "topk:density=0.01"
"""

import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hvd_compress.torch as hvd

SHARDS = 2  # ranks of a node: int(os.environ["LOCAL_WORLD_SIZE"]) where there are several nodes
device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group()
mesh = init_device_mesh(
    device, (dist.get_world_size() // SHARDS, SHARDS), mesh_dim_names=("replica", "shard")
)
layers = [torch.nn.Linear(64, 512), torch.nn.Linear(512, 512), torch.nn.Linear(512, 10)]
model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
for part in (*layers, model):
    fully_shard(part.to(device), mesh=mesh["shard"])
exchange = hvd.compress_replicas(model, mesh["replica"], *(sys.argv[1:] or ["topk:density=0.01"]))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
x, y = (torch.as_tensor(a, device=device) for a in load_digits(return_X_y=True))
x, batches = x.float() / 16, torch.Generator().manual_seed(dist.get_rank())
for _ in range(301):
    batch = torch.randint(1500, (32,), generator=batches)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
    optimizer.step()
accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean().item()
if dist.get_rank() == 0:
    print(f"test accuracy {accuracy:.1%}\n{exchange.stats().line()}")
dist.destroy_process_group()
