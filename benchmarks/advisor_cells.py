"""The measured times of steps, beside what the advisor says, and what its choice would have lost.

    sudo .venv/bin/python tests/cluster --hosts 2 --rate 1gbit -- python benchmarks/advisor_cells.py

Measured are whole steps of ``mpi.Reducer`` on the gradients of small models, whose backward pass is
a number of short sleeps, between which gradients become ready: so cores stay free for the exchange.
The advisor knows the network as measured between these ranks, and the methods as measured on them.
"""
# ruff: noqa: E402  A process that is no rank must not import MPI, which starts with it.

from __future__ import annotations

import statistics
import time

import numpy as np

from hvd_compress.advisor import CANDIDATES, MODELS, choose, measured, step_of
from hvd_compress.advisor.shapes import Shapes
from hvd_compress.cli.options import parser_of
from hvd_compress.launch import under_mpirun

parser = parser_of(__doc__)
parser.add_argument("--models", nargs="+", default=["mobilenet_v2", "small_transformer"])
parser.add_argument("--backward-ms", type=float, nargs="+", default=[0, 100])
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--ranks", type=int, default=2, help="when started without mpirun")
options = parser.parse_args()
under_mpirun(options.ranks)

from mpi4py import MPI
from turns import slowest, turns

from hvd_compress import mpi
from hvd_compress.cli.advise import measured_network

world = MPI.COMM_WORLD


def step(reducer: mpi.Reducer, gradients: dict[str, np.ndarray], backward: float) -> None:
    """Take a step, of which gradients become ready throughout ``backward``."""
    start = time.perf_counter()
    elements, ready = sum(x.size for x in gradients.values()), 0
    for name, x in reversed(gradients.items()):
        ready += x.size
        due = start + backward * ready / elements
        if (rest := due - time.perf_counter()) > 1e-3:
            time.sleep(rest)
        reducer.start(name, x)
    reducer.finish()


def samples(shapes: Shapes, backward: float, methods: list[str]) -> dict[str, float]:
    """Median seconds of a step by method."""
    random = np.random.default_rng(world.rank)
    gradients = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    reducers = {}
    for method in methods:
        momentum = {"momentum": 0.9} if method.startswith("dgc") else {}
        reducers[method] = mpi.Reducer(method, in_place=True, **momentum)
        reducers[method].step = 250_000  # behind dense steps
    found: dict[str, list[float]] = {method: [] for method in methods}
    for number, method in turns(methods, options.rounds + 2):
        own = {name: x.copy() for name, x in gradients.items()}
        seconds = slowest(world, step, reducers[method], own, backward)
        if number > 1:
            found[method].append(seconds)
    return {method: statistics.median(seconds) for method, seconds in found.items()}


def main() -> None:
    network, is_first = measured_network()
    network = world.bcast(network)
    methods = [candidate.method for candidate in CANDIDATES]
    if is_first:
        print(
            f"{network.ranks} ranks, {network.bandwidth / 1e6:,.0f} Mbit/s, "
            f"{1e6 * network.latency:.0f} us"
        )
    for model in options.models:
        shapes = MODELS[model]()
        pieces = {method: measured(method, shapes) for method in methods}
        for backward in (ms / 1000 for ms in options.backward_ms):
            real = samples(shapes, backward, methods)
            if not is_first:
                continue
            print(f"\n{model}, {1000 * backward:g} ms of backward: measured, by the model, error")
            errors = []
            for method in methods:
                said = step_of(pieces[method], network, backward).whole
                errors.append(said / real[method] - 1)
                print(
                    f"  {method:20} {1000 * real[method]:8.1f} ms {1000 * said:8.1f} ms "
                    f"{errors[-1]:+6.0%}"
                )
            chosen = choose(pieces, network, backward)
            best = min(real, key=lambda method: real[method])
            print(
                f"  error {statistics.median(map(abs, errors)):.0%} in the median; advised is "
                f"{chosen}, the best is {best}: T(choice) / T(best) {real[chosen] / real[best]:.3f}"
            )


if __name__ == "__main__":
    main()
