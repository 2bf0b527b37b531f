"""Train on real scans with Ray's TorchTrainer, by two workers: python mpi_examples/train_ray.py"""

import sys
import tempfile
from pathlib import Path

import ray.train as rt
import ray.train.torch
import torch
from sklearn.datasets import load_digits

from hvd_compress.torch import DDPState, ddp_hook


def work(config: dict[str, str]) -> None:
    first, second = torch.nn.Linear(64, 1024), torch.nn.Linear(1024, 10)
    model = rt.torch.prepare_model(torch.nn.Sequential(first, torch.nn.ReLU(), second))
    state = DDPState(config["method"], model)  # these two lines are new
    model.register_comm_hook(state, ddp_hook)
    optimizer, begin = torch.optim.AdamW(model.parameters(), lr=0.005), 0
    if before := rt.get_checkpoint():  # a worker has failed
        *saved, begin = torch.load(Path(before.path, "all.pt"))
        for part, its in zip((model, optimizer, state), saved, strict=True):
            part.load_state_dict(its)
    x, y = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
    x, rank = x.float() / 16, rt.get_context().get_world_rank()
    for epoch in range(begin, 5):
        order = torch.randperm(1500, generator=torch.Generator().manual_seed(epoch))
        for batch in order[rank::2].split(32):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        states = [part.state_dict() for part in (model, optimizer, state)]  # on all workers
        accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean().item()
        text = {"text": f"test accuracy {accuracy:.1%}\n{state.stats().line()}"}
        with tempfile.TemporaryDirectory() as at:
            torch.save([*states, epoch + 1], Path(at, "all.pt"))
            rt.report(text, rt.Checkpoint.from_directory(at) if rank == 0 else None)


ray.init(num_cpus=3)  # one for each worker, one for the trainer; leave it out on a cluster
place = {"run_config": rt.RunConfig(storage_path=str(Path("results/ray").absolute()))}
place["scaling_config"] = rt.ScalingConfig(num_workers=2)
method = {"method": (sys.argv[1:] or ["topk:density=0.01"])[0]}
print(rt.torch.TorchTrainer(work, train_loop_config=method, **place).fit().metrics["text"])
