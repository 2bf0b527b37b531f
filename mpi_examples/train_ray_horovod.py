"""Train on real scans with Horovod on Ray, with compressed gradients.

python mpi_examples/train_ray_horovod.py "dgc:density=0.01"
"""

import sys

import ray
import torch
from horovod.ray import RayExecutor
from sklearn.datasets import load_digits

import hvd_compress.torch as hvd


def train(method: str) -> str:
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10)
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    names, sgd = model.named_parameters(), torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=names, compression=method)
    x, y = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
    x, batches = x.float() / 16, torch.Generator().manual_seed(hvd.rank())
    for _ in range(120):
        batch = torch.randint(1500, (32,), generator=batches)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean().item()
    return f"test accuracy {accuracy:.1%}\n{optimizer.compression.stats().line()}"


ray.init(num_cpus=2)  # one for each worker; leave it out on a cluster
executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=2)
executor.start()
print(executor.run(train, args=(sys.argv[1:] or ["dgc:density=0.01"]))[0])
executor.shutdown()
