"""``python -m tests.trainers.ray_job FOLDER``: a worker of Ray's TorchTrainer fails, and those that
take over end with the bits of a run in which nothing failed."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import ray.train as rt
import ray.train.torch
import torch

from hvd_compress.torch import DDPState, ddp_hook
from tests import group_worker
from tests.trainers import common


def work(config):
    model = rt.torch.prepare_model(common.network())
    state = DDPState(common.METHOD, model, residuals="ranks")
    model.register_comm_hook(state, ddp_hook)
    optimizer, first = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 0
    if before := rt.get_checkpoint():
        *saved, first = torch.load(Path(before.path, "all.pt"))
        for part, its in zip((model, optimizer, state), saved, strict=True):
            part.load_state_dict(its)
    x, y = common.images()
    rank = rt.get_context().get_world_rank()
    for step in range(first, 6):
        if step == config["fails_at"] and not first:
            raise RuntimeError("a worker fails")
        for part in range(2):
            mine = slice(16 * part + rank * 64, 16 * part + rank * 64 + 16)
            optimizer.zero_grad()
            common.loss_of(model, x[mine], y[mine]).backward()
            optimizer.step()
        group_worker.assert_same_everywhere(model)
        saved = [part.state_dict() for part in (model, optimizer, state)]
        with tempfile.TemporaryDirectory() as folder:
            torch.save([*saved, step + 1], Path(folder, "all.pt"))
            rt.report({}, rt.Checkpoint.from_directory(folder) if rank == 0 else None)
    common.assert_compressed(state, 12 - 2 * first)


def main() -> None:
    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=2**27)
    found = []
    for name, fails_at in (("whole", None), ("failed", 3)):
        trainer = rt.torch.TorchTrainer(
            work,
            train_loop_config={"fails_at": fails_at},
            scaling_config=rt.ScalingConfig(num_workers=2),
            run_config=rt.RunConfig(
                name=name,
                storage_path=sys.argv[1],
                failure_config=rt.FailureConfig(max_failures=fails_at is not None),
            ),
        )
        found.append(torch.load(Path(trainer.fit().checkpoint.path, "all.pt")))
    (model, _, state, last), (again, _, its, _) = found
    assert last == 6
    assert all(torch.equal(x, again[name]) for name, x in model.items())
    assert state["step"] == its["step"] == 12
    for theirs, ours in zip(state["ranks"], its["ranks"], strict=True):
        assert all(torch.equal(theirs[n]["residual"], ours[n]["residual"]) for n in theirs)
    print("the same bits")


if __name__ == "__main__":
    main()
