"""Costs and savings of ``hvd.compress_shards`` against PyTorch's own FSDP2, with four ranks over
Gloo.

    python -m benchmarks.shards quality              # loss of the transformer of quality.py
    sudo .venv/bin/python -m tests.cluster --hosts 2 --ranks-per-host 2 --rate 1gbit -- \\
        python -m benchmarks.shards times --network 1gbit
    python -m benchmarks.shards --help

"quality" trains the recipe "bytes" of quality.py, each block sharded by itself, and keeps test
losses after each quarter of the steps. "times" takes steps of a perceptron, forward, backward and
SGD's; the slowest rank counts, and the ways take turns. "sent" is what a rank sends to others in a
step, by the messages' sizes; of PyTorch's own collectives, what they would send directly.
Results are kept in shards.json.
"""
# ruff: noqa: E402  A process that is no rank must not import MPI, which starts with it.

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.turns import turns, write_rows
from hvd_compress.cli.options import parser_of, positive
from hvd_compress.launch import under_mpirun

#: the options of compress_shards and of fully_shard, by name
WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "FSDP2 float32": ({}, False),
    "FSDP2 bfloat16": ({}, True),
    "bf16": ({"compression": "bf16"}, False),
    "linear": ({"compression": "linear"}, False),
    "linear, no residual": ({"compression": "linear", "residual": None}, False),
    "fp8": ({"compression": "fp8"}, False),
    "linear:bits=4": ({"compression": "linear:bits=4"}, False),
    "linear:bits=4, no residual": ({"compression": "linear:bits=4", "residual": None}, False),
    "linear, parameters": ({"compression": "linear", "parameters": "linear"}, False),
    "linear:bits=4, parameters": (
        {"compression": "linear:bits=4", "parameters": "linear:bits=4"},
        False,
    ),
    "linear in bfloat16": ({"compression": "linear"}, True),
    "linear, parameters in bfloat16": ({"compression": "linear", "parameters": "linear"}, True),
    "linear:bits=4, parameters in bfloat16": (
        {"compression": "linear:bits=4", "parameters": "linear:bits=4"},
        True,
    ),
    "linear:bits=4, nodes, parameters in bfloat16": (
        {"compression": "linear:bits=4", "parameters": "linear", "nodes": 2},
        True,
    ),
}
QUALITY = [name for name in WAYS if "bfloat16" not in name]
TIMES = ["FSDP2 float32", *(name for name in WAYS if "bfloat16" in name)]

parser = parser_of(__doc__)
parser.add_argument("what", choices=["quality", "times"])
parser.add_argument("--ways", nargs="+", choices=[*WAYS], help="all that are kept, if not given")
parser.add_argument("--ranks", type=positive, default=4)
parser.add_argument("--results", type=Path, default=Path(__file__).with_suffix(".json"))
parser.add_argument("--seeds", type=positive, default=3, help="of quality")
parser.add_argument("--minutes", type=float, default=math.inf, help="of quality: none starts later")
parser.add_argument("--steps", type=positive, help="of quality, instead of the recipe's")
parser.add_argument("--network", default="one machine", help="of times: its name")
parser.add_argument("--layers", type=positive, default=8, help="of times")
parser.add_argument("--width", type=positive, default=1024, help="of times")
parser.add_argument("--batch-size", type=positive, default=16, help="of times")
parser.add_argument("--rounds", type=positive, default=9, help="of times")
options = parser.parse_args()
under_mpirun(options.ranks)

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import hvd_compress.torch as hvd
import hvd_compress.torch.mpi as over_mpi
from benchmarks.contender_torch import Sharded, start_process_group
from benchmarks.recipes import RECIPES
from mpi_examples.study import rate


def sharded(model: torch.nn.Module, blocks: Any, name: str) -> Any:
    """Shard a model, and return the exchange, if it is not PyTorch's own."""
    compressed, is_half = WAYS[name]
    half = torch.bfloat16 if is_half else None
    for part in (*blocks, model):
        fully_shard(part, mp_policy=MixedPrecisionPolicy(half, half))
    return hvd.compress_shards(model, **compressed) if compressed else None


def quality(name: str, seed: int) -> dict[str, Any]:
    """Return the test losses of a training, the same on all ranks."""
    torch.manual_seed(seed)
    recipe = RECIPES["bytes"](None)
    model: Any = recipe.model()
    exchange = sharded(model, model.layers.layers, name)
    optimizer = recipe.optimizer(model.parameters(), recipe.lr)
    steps, batches = options.steps or recipe.steps, recipe.batches(seed)
    rank, curve, start = dist.get_rank(), [], time.perf_counter()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = recipe.lr * rate(step / steps)
        optimizer.zero_grad()
        recipe.loss(model, next(batches)[rank])[0].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        if (step + 1) % max(steps // 4, 1) == 0:
            with torch.no_grad():
                own = itertools.islice(recipe.tests(), rank, None, dist.get_world_size())
                losses = [recipe.loss(model, batch)[0] for batch in own]
            dist.all_reduce(loss := torch.stack(losses).mean(), dist.ReduceOp.AVG)
            curve.append(loss.item())
    total = exchange and exchange.stats().total
    row = {"loss": curve[-1], "curve": curve, "steps": steps}
    if total:
        row |= {"sent": total.bytes_sent / total.steps, "dense": total.dense_bytes / total.steps}
    return {**row, "seconds": time.perf_counter() - start}


class Contender(Sharded):
    """FSDP2 of PyTorch, or one of the ways to compress it."""

    def shard(self) -> Any:
        return sharded(self.model, self.blocks, self.name)

    def sent(self) -> dict[str, float]:
        """Return the bytes of a step: of gradients, and of parameters."""
        others, item = dist.get_world_size() - 1, 2 if WAYS[self.name][1] else 4
        shard = sum(p.to_local().numel() for p in self.model.parameters())
        dense = others * shard * item
        # FSDP2 gathers in forward and in backward, but there not what the last module has.
        found = {"gradients": dense, "parameters": dense * (2 - 1 / options.layers)}
        if self.exchange is not None:
            layers = self.exchange.stats().layers
            for what, is_parameter in (("gradients", False), ("parameters", True)):
                own = [x for name, x in layers.items() if name.endswith("gathered") == is_parameter]
                if own:
                    found[what] = sum(x.bytes_sent / x.steps for x in own)
        return found


def times() -> dict[str, Any]:
    names = options.ways or TIMES
    size = options.layers, options.width, options.batch_size
    contenders = {name: Contender(name, *size) for name in names}
    torch.manual_seed(1 + dist.get_rank())
    warmup = 2  # rounds that are not counted
    for number, name in turns(names, warmup + options.rounds):
        contenders[name].take(is_counted=number >= warmup)
    rows = {}
    for name, each in contenders.items():
        median, least = statistics.median(each.seconds), min(each.seconds)
        row = {"median": median, "least": least, "rounds": options.rounds, **each.sent()}
        rows[f"times, {options.network}: {name}"] = row
    return rows


def show(known: dict[str, Any]) -> None:
    for key, row in known.items():
        if key.startswith("times"):
            print(
                f"{key:<64}{1000 * row['median']:8.0f} ms, least {1000 * row['least']:8.0f}, sent "
                f"{row['gradients'] / 1000:10,.1f} kB of gradients, "
                f"{row['parameters'] / 1000:10,.1f} kB of parameters"
            )
    for name in QUALITY:
        rows = {
            seed: known[key]
            for seed in range(options.seeds)
            if (key := f"quality: {name}, seed {seed}") in known
        }
        dense = [known.get(f"quality: {QUALITY[0]}, seed {seed}") for seed in rows]
        more = [
            100 * (row["loss"] / plain["loss"] - 1)
            for row, plain in zip(rows.values(), dense, strict=True)
            if plain
        ]
        if more:
            mean = statistics.mean(row["loss"] for row in rows.values())
            seeds = ", ".join(f"{each:+.2f}" for each in more)
            print(f"{name:<30} loss {mean:.4f}, {statistics.mean(more):+.2f} % ({seeds})")


def main() -> None:
    over_mpi.init()
    torch.set_num_threads(1)
    start_process_group(over_mpi)
    known = json.loads(options.results.read_text()) if options.results.exists() else {}
    if options.what == "times":
        known |= times()
    else:
        until = time.monotonic() + 60 * options.minutes
        for seed in range(options.seeds):
            for name in options.ways or QUALITY:
                key = f"quality: {name}, seed {seed}"
                late = torch.tensor(float(time.monotonic() > until))
                dist.broadcast(late, 0)
                if key not in known and not late:
                    known[key] = quality(name, seed)
                    if dist.get_rank() == 0:
                        write_rows(known, options.results)
    if dist.get_rank() == 0:
        write_rows(known, options.results)
        show(known)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
