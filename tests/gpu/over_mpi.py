"""``mpirun -np 2 python mpi_gpu.py``: collectives and training on CUDA tensors."""

from __future__ import annotations

import torch
from mpi4py import MPI

import hvd_compress.torch.mpi as hvd
from hvd_compress import Sparse, mpi


def gradient(rank: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(rank)).to(dtype)


def main() -> None:
    world = MPI.COMM_WORLD
    device = torch.device("cuda", world.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    hvd.init()

    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        everyones = torch.stack([gradient(rank, 100_003, dtype) for rank in range(world.size)])
        mine = everyones[world.rank].to(device)
        exact = everyones.double().sum(0)
        tolerance = {torch.float16: 1e-2, torch.bfloat16: 5e-2}.get(dtype, 1e-4)
        for algorithm in ("ring", "halving_doubling", "direct"):
            total = mpi.allreduce(mine, algorithm=algorithm)
            assert total.device == device
            assert total.dtype == dtype
            torch.testing.assert_close(total.cpu().double(), exact, rtol=tolerance, atol=tolerance)
            kept = mine.clone()
            assert mpi.allreduce(kept, algorithm=algorithm, out=kept) is kept
            assert torch.equal(kept, total)

    indices = torch.arange(world.rank, 1000, 10, device=device)
    total = mpi.sparse_allreduce(
        Sparse(indices, torch.ones(len(indices), device=device)), 1000
    ).dense(1000)
    assert total.device == device
    assert total.sum().item() == 100 * world.size

    torch.manual_seed(0)
    model = torch.nn.Linear(100, 100).to(device)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=hvd.DGC(density=0.01),
    )
    for step in range(5):
        optimizer.zero_grad()
        x = torch.randn(8, 100, generator=torch.Generator().manual_seed(step * 100 + world.rank))
        model(x.to(device)).square().mean().backward()
        optimizer.step()
    weights = world.allgather(model.weight.detach().cpu().numpy().tobytes())
    assert len(set(weights)) == 1


if __name__ == "__main__":
    main()
