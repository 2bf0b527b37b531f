"""What averaging a gradient costs over ranks and elements: measured here, and by a model beyond.

    python benchmarks/scaling.py                      # 2, 4, 8 and 16 ranks on this machine
    mpirun -np 8 -H node1:4,node2:4 python benchmarks/scaling.py
    sudo .venv/bin/python tests/cluster --hosts 16 --timeout 600 -- python benchmarks/scaling.py
    python benchmarks/scaling.py --load results/scaling.json --gbits 10 --latency-us 50

Measured are whole steps of ``mpi.Reducer`` in float32, in fp16 and with DGC, on the first 2, 4, 8
... of the ranks, while the others sleep; the constants of the model on each of these; and
collectives of four ranks, beside what the cost model says of them.  What was measured on four ranks
also predicts the others, and up to 1024 ranks and 10**9 elements.  ``--load`` predicts again
without measuring, for another network if you like.
"""
# ruff: noqa: E402  A process that is no rank must not import MPI, which starts with it.

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from hvd_compress.cli.options import parser_of, picture_file
from hvd_compress.integrations.launch import under_mpirun

parser = parser_of(__doc__)
add = parser.add_argument
add("--rounds", type=int, default=7, help="samples of each point; three if they take seconds")
add("--predict", type=int, nargs="*", default=[64, 256, 1024], help="numbers of ranks")
add("--elements", type=int, default=25_557_032, help="of the model to predict for: ResNet-50")
add(
    "--sizes",
    type=float,
    nargs="*",
    default=[1e5, 1e6, 1e7, 5e7, 1e8],
    help="elements of the gradients that are measured, besides --elements",
)
add("--density", type=float, default=0.001)
add("--ranks", type=int, default=16, help="when started without mpirun")
add("--memory", type=float, default=12, help="GB of all ranks; larger points are left out")
add("--gbits", type=float, help="predict for links of so many Gbit/s")
add("--latency-us", type=float, help="predict for rounds of so many microseconds")
add("--load", type=Path, help="what --output wrote: measure nothing")
add("--output", type=Path, default=Path("results/scaling.json"))
add("--picture", type=picture_file, default=Path("results/scaling.png"))
options = parser.parse_args()
if options.load is None:
    under_mpirun(options.ranks)

from mpi4py import MPI
from scaling_report import report

from hvd_compress import Sparse, kernels, mpi
from hvd_compress.backends import backend_of
from hvd_compress.mpi.sparse import ALGORITHMS as SPARSE
from hvd_compress.wire import decode_sparse, encode_sparse

world = MPI.COMM_WORLD
DENSE = ("ring", "halving_doubling", "direct")
METHODS = {
    "float32": "none:algorithm=auto",
    "fp16": "fp16:algorithm=auto",
    "DGC": f"dgc:density={options.density}",
}
#: bytes an element of a rank that measures all methods in turn, and seconds for a point after which
#: three samples do
_BYTES, _LONG = 40, 3.0


def samples(
    comm: MPI.Comm, calls: Sequence[tuple[Callable[[], object], Callable[[], object]]]
) -> list[list[float]]:
    """Return the seconds of each call on the slowest rank; of each pair, the first call prepares
    the second.  Calls take turns, and the first three rounds are not counted, or the first ones
    that last long."""
    found: list[list[float]] = [[] for _ in calls]
    spent, number = 0.0, 0
    while len(found[0]) < (options.rounds if spent < _LONG else min(3, options.rounds)):
        counts = number > 2 or spent > _LONG
        for i in range(len(calls)):
            turn = (number + i) % len(calls)
            prepare, call = calls[turn]
            prepare()
            comm.Barrier()
            start = time.perf_counter()
            call()
            seconds = comm.allreduce(time.perf_counter() - start, MPI.MAX)
            spent += seconds
            if counts:
                found[turn].append(seconds)
        number += 1
    return found


def median_seconds(comm: MPI.Comm, call: Callable[[], object]) -> float:
    return statistics.median(samples(comm, [(lambda: None, call)])[0])


def steps(comm: MPI.Comm, model: mpi.CostModel | None, n: int) -> dict[str, list[float]]:
    """Seconds of a whole step, by method.  Gradients are other ones each time."""
    pool = np.random.default_rng(comm.rank).standard_normal(2**20 + 1000, np.float32)
    shifts = np.random.default_rng(0)
    gradient = np.zeros((1, n), np.float32)  # of a matrix, since DGC sends vectors whole

    def fill() -> None:
        shift = int(shifts.integers(1000))
        for start in range(0, n, 2**20):
            part = gradient[0, start : start + 2**20]
            part[:] = pool[shift : shift + part.size]

    calls = []
    own = mpi.Communicator(comm, checks=0)
    own.cost_model = model
    for method in METHODS.values():
        momentum = {"momentum": 0.9} if method.startswith("dgc") else {}
        reducer = mpi.Reducer(method, comm=own, in_place=True, **momentum)
        calls.append((fill, lambda reducer=reducer: reducer.reduce({"g": gradient})))
    return dict(zip(METHODS, samples(comm, calls), strict=True))


def constants(comm: MPI.Comm, cost: mpi.CostModel) -> dict[str, Any]:
    """What :class:`scaling_model.StepModel` needs."""
    n = min(options.elements, 10**7)
    gradient, velocity, residual = (np.full(n, 0, np.float32) for _ in range(3))
    streaming = median_seconds(comm, lambda: kernels.stream([(gradient, velocity, residual)]))
    part = np.ones(min(n, 10**6), np.float32)
    casting = median_seconds(comm, lambda: backend_of(part).round_to(part, "float16"))
    k = math.ceil(options.density * n)
    frame = seconds_to_add(comm, n, 1)
    entry = max(seconds_to_add(comm, n, k) - frame, 0.0) / k
    alone = steps(MPI.COMM_SELF, None, 2000)
    python = {name: statistics.median(seconds) for name, seconds in alone.items()}
    return {
        "cost": dataclasses.asdict(cost),
        "stream": streaming / (20 * n),
        "cast": casting / part.size,
        "frame": frame,
        "entry": entry,
        "python": {name: comm.allreduce(s, MPI.MAX) for name, s in python.items()},
        "density": options.density,
    }


def seconds_to_add(comm: MPI.Comm, n: int, k: int) -> float:
    """Seconds to decode one more message of ``k`` entries and add it to an array of ``n``."""
    frames = [encode_sparse(*random_places(seed, k, n), n, "packed") for seed in range(8)]
    out = kernels.Column([np.zeros(n, np.float32)])

    def add_up(count: int) -> None:
        parts = [decode_sparse(frame, n, "float32") for frame in frames[:count]]
        kernels.add_up(out, [at for at, _ in parts], [what for _, what in parts], count)

    # Of two frames and of eight, since both write the whole array; a difference of medians would be
    # one of disturbances.
    two, eight = samples(comm, [(lambda: None, lambda c=c: add_up(c)) for c in (2, 8)])
    return max(min(eight) - min(two), 0.0) / 6


def collectives(comm: MPI.Comm, model: mpi.CostModel) -> list[tuple[str, str, float, float]]:
    """(algorithm, what, measured, predicted)."""
    own = mpi.Communicator(comm, checks=0)
    points: list[tuple[str, str, Callable[[], object], float]] = []
    for size in (4096, 65536, 2**20, 2**23):
        x = np.ones(size // 4, np.float32)
        for name in DENSE:
            points.append(
                (
                    name,
                    f"{size:,} bytes",
                    lambda x=x, name=name: mpi.allreduce(x, algorithm=name, comm=own),
                    model.formula(name, size, model.size),
                )
            )
    n = options.elements
    for k in (n // 10_000, n // 1000, n // 100):
        sparse = random_places(comm.rank, k, n)
        for name in SPARSE:
            points.append(
                (
                    name,
                    f"{k:,} of {n:,}",
                    lambda s=sparse, name=name: mpi.sparse_allreduce(
                        s, n, algorithm=name, comm=own
                    ),
                    model.sparse_formula(name, k, n, model.size),
                )
            )
    return [
        (name, what, median_seconds(comm, call), predicted)
        for name, what, call, predicted in tqdm(
            points, desc="collectives", disable=comm.rank != 0, ncols=90, leave=False
        )
    ]


def random_places(seed: int, k: int, n: int) -> Sparse:
    generator = np.random.default_rng(seed)
    indices = np.unique(generator.integers(0, n, k))
    return Sparse(indices, generator.standard_normal(len(indices)).astype(np.float32))


def measured() -> dict[str, Any]:
    """Everything that the report needs, as JSON holds it; complete on rank 0."""
    groups = sorted({2**i for i in range(1, world.size.bit_length())} | {world.size})
    base = max(p for p in groups if p <= max(4, groups[0]))
    sizes = sorted({int(n) for n in options.sizes} | {options.elements})
    points = [(p, n) for p in groups for n in sizes]
    fitting = [(p, n) for p, n in points if p * n * _BYTES <= 1e9 * options.memory]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"elements": options.elements, "base": base, "constants": {}}
    found |= {"collectives": [], "points": [], "left_out": [*set(points) - set(fitting)]}
    with tqdm(total=len(fitting), disable=world.rank != 0, ncols=90, desc="steps") as bar:
        for p in groups:
            comm = world.Split(0 if world.rank < p else MPI.UNDEFINED)
            if world.rank < p:
                model = mpi.measure(comm, repeats=options.rounds)
                found["constants"][str(p)] = constants(comm, model)
                if p == base:
                    found["collectives"] = collectives(comm, model)
                for n in (n for q, n in fitting if q == p):
                    for method, seconds in steps(comm, model, n).items():
                        row = {"method": method, "ranks": p, "elements": n, "seconds": seconds}
                        found["points"].append(row)
                    bar.update()
                    if world.rank == 0:  # what there is, should the job be ended
                        options.output.write_text(json.dumps(found, indent=1) + "\n")
            asleep = world.Ibarrier()  # the others' cores are for those that measure
            while not asleep.Test():
                time.sleep(0.02)
    return found


def main() -> None:
    if options.load is not None:
        found = json.loads(options.load.read_text())
    else:
        if world.size == 1:
            raise SystemExit("one rank sends nothing: start two or more")
        found = measured()
        if world.rank:
            return
    latency = None if options.latency_us is None else 1e-6 * options.latency_us
    report(found, options.predict, options.picture, gbits=options.gbits, latency=latency)


if __name__ == "__main__":
    main()
