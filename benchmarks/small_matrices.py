"""PowerSGD's own work for many matrices of one shape: one after the other, and stacked.

One process, no network: what a step of all exchanges takes, by the median of some.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from hvd_compress import Context, PowerSGD
from hvd_compress.engines.joining import Member, joined
from hvd_compress.engines.lockstep import run
from hvd_compress.stats import Record


def alone(exchanges: dict[str, Any]) -> dict[str, Any]:
    return {name: run([exchange])[0] for name, exchange in exchanges.items()}


def stacked(exchanges: dict[str, Any]) -> dict[str, Any]:
    members = [Member(name, exchange, Record()) for name, exchange in exchanges.items()]
    return run([joined(members, 0, 1)])[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--matrices", type=int, default=200)
    parser.add_argument("--shape", type=int, nargs=2, default=(64, 64))
    parser.add_argument("--ranks", type=int, nargs="+", default=(1, 2, 4), help="of PowerSGD")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    print(f"{options.matrices} matrices of {tuple(options.shape)}, median of a step")
    for rank in options.ranks:
        method = PowerSGD(rank=rank, start=0, min_compression_rate=1)
        names = [f"w{i}" for i in range(options.matrices)]
        gradients = {n: torch.randn(*options.shape, device=options.device) for n in names}
        times: dict[Any, list[float]] = {alone: [], stacked: []}
        states = {way: {n: method.init(g) for n, g in gradients.items()} for way in times}
        for step in range(options.rounds):
            for way, seconds in times.items():
                begin = time.perf_counter()
                outcomes = way(
                    {
                        n: method.exchange(g, states[way][n], Context(name=n, step=step))
                        for n, g in gradients.items()
                    }
                )
                if options.device != "cpu":
                    torch.cuda.synchronize()
                seconds.append(time.perf_counter() - begin)
                states[way] = {n: outcome.state for n, outcome in outcomes.items()}
        one, other = (statistics.median(seconds) * 1e3 for seconds in times.values())
        print(f"rank {rank}: {one:.1f} ms alone, {other:.1f} ms stacked, {one / other:.1f}x")


if __name__ == "__main__":
    main()
