"""Time of a step of a model that FSDP2 shards inside hosts: PyTorch's own HSDP, which averages
between hosts in float32 or bfloat16, and ``hvd.compress_replicas`` with several methods.

    python benchmarks/hsdp.py                      # 2 replicas of 2 shards on this machine
    sudo .venv/bin/python -m tests.cluster --hosts 2 --ranks-per-host 2 --rate 1gbit -- \\
        python benchmarks/hsdp.py

A step is forward, backward and SGD's step of a perceptron; the slowest rank counts. The methods
take turns. "sent" is what a rank sends to other replicas, by the
messages' sizes: of HSDP, its shard times the bytes of an element.
"""
# ruff: noqa: E402  A process that is no rank must not import MPI, which starts with it.

from __future__ import annotations

import statistics
from typing import Any

from hvd_compress.cli.options import parser_of
from hvd_compress.launch import under_mpirun

parser = parser_of(__doc__)
parser.add_argument("--ranks", type=int, default=4, help="when started without mpirun")
parser.add_argument("--shards", type=int, default=2, help="ranks of a replica")
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--rounds", type=int, default=9)
parser.add_argument("--warmup", type=int, default=3, help="rounds that are not counted")
parser.add_argument(
    "--methods",
    nargs="+",
    default=["none", "bf16", "topk:density=0.01", "dgc:density=0.001"],
)
options = parser.parse_args()
under_mpirun(options.ranks)

import torch
import torch.distributed as dist
from contender_torch import Sharded, start_process_group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from turns import turns

import hvd_compress.torch as hvd
import hvd_compress.torch.mpi as over_mpi
from hvd_compress.methods import as_compressor

HSDP = {"HSDP float32": None, "HSDP bfloat16": torch.bfloat16}


class Contender(Sharded):
    """HSDP of PyTorch, or replicas that a method compresses."""

    def __init__(self, name: str, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        super().__init__(name, options.layers, options.width, options.batch_size)

    def shard(self) -> Any:
        policy = MixedPrecisionPolicy(reduce_dtype=HSDP.get(self.name))
        own = self.mesh if self.name in HSDP else self.mesh["shard"]
        for part in (*self.blocks, self.model):
            fully_shard(part, mesh=own, mp_policy=policy)
        if self.name in HSDP:
            return None
        method, taken = as_compressor(self.name), {}
        if method.takes_momentum:
            self.momentum, taken = 0.0, {"momentum": self.momentum}
        return hvd.compress_replicas(self.model, self.mesh["replica"], method, **taken)

    @property
    def sent(self) -> float:
        """The bytes of a step."""
        if self.exchange is not None:
            total = self.exchange.stats().total
            return total.bytes_sent / total.steps
        shard = sum(p.to_local().numel() for p in self.model.parameters())
        return shard * (2 if HSDP[self.name] else 4)


def main() -> None:
    over_mpi.init()
    start_process_group(over_mpi)
    size, rank = dist.get_world_size(), dist.get_rank()
    shape = size // options.shards, options.shards
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard"))
    contenders = {name: Contender(name, mesh) for name in (*HSDP, *options.methods)}
    torch.manual_seed(1 + rank)
    for number, name in turns([*contenders], options.warmup + options.rounds):
        contenders[name].take(is_counted=number >= options.warmup)
    if rank == 0:
        model = next(iter(contenders.values())).model
        elements = sum(p.numel() for p in model.parameters())
        print(f"{shape[0]} replicas of {shape[1]} shards, {elements:,} elements")
        for each in contenders.values():
            median, least = statistics.median(each.seconds), min(each.seconds)
            print(
                f"{each.name:<24}{1000 * median:8.1f} ms, least {1000 * least:8.1f} ms, "
                f"sent {each.sent / 1000:10,.1f} kB"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
