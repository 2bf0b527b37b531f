"""The devices of models and batches of jobs, and what exchanges them: SCENARIOS_DEVICE=cuda has the
ranks share a GPU, which NCCL, SCENARIOS_BACKEND=nccl, refuses to more than one."""

import os

import torch
import torch.distributed as dist

DEVICE = torch.device(os.environ.get("SCENARIOS_DEVICE", "cpu"))
BACKEND = os.environ.get("SCENARIOS_BACKEND", "gloo")


def start_process_group() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    own = torch.device("cuda", torch.cuda.current_device()) if BACKEND == "nccl" else None
    dist.init_process_group(BACKEND, device_id=own)
