"""Biased compression: rates, an example of divergence, and error per byte of many operators.

    python -m mpi_examples.biased_compression
    python -m mpi_examples.biased_compression --split labels --ranks 8
    python -m mpi_examples.biased_compression --mpi

After Beznosikov, Horvath, Richtarik and Safaryan, "On Biased Compression for Distributed Learning"
(JMLR 2023).  Regularised logistic regression on scikit-learn's digits, full gradients, constant
steps; every operator gets the same grid of step sizes, and bytes are counted from its messages.
The ranks advance in lockstep inside this process, or with --mpi as processes of their own.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from hvd_compress import EF21, Compressor, NoCompression
from hvd_compress.blocks import (
    allgather,
    allreduce,
    chain,
    contraction,
    error_feedback,
    gather_drawn,
    natural,
    natural_dithering,
    random_k,
    rounding,
    scaled_sign,
    top_k,
)
from hvd_compress.cli.options import parser_of, picture_file
from hvd_compress.engines.lockstep import World
from hvd_compress.integrations.launch import under_mpirun
from hvd_compress.operators.base import Classes
from hvd_compress.stats import human_bytes
from hvd_compress.studies.step_sizes import FeedbackSteps, ef21_step_size
from mpi_examples.regression import Regression
from mpi_examples.study import check_counts


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="when started without mpirun")
    parser.add_argument("--mpi", action="store_true", help="ranks are processes, over MPI")
    parser.add_argument(
        "--split",
        choices=["shuffled", "labels"],
        default="shuffled",
        help="which digits a rank has: any, or few kinds of them, so that gradients differ more",
    )
    parser.add_argument("--density", type=float, default=0.05, help="of top-k and random-k")
    parser.add_argument("--levels", type=int, default=7, help="of dithering")
    parser.add_argument("--l2", type=float, default=0.05, help="weight of the regulariser")
    parser.add_argument("--steps", type=int, default=400, help="at most, for each step size")
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[2, 4, 8, 16],
        metavar="R",
        help="step sizes to try, in units of 1 / L",
    )
    parser.add_argument(
        "--output", type=picture_file, default=Path("results/biased_compression.png")
    )
    options = parser.parse_args()
    check_counts(parser, options, "ranks", "steps", "levels")
    if not 0 < options.density <= 1:
        parser.error("--density must be in (0, 1]")
    if not options.l2 > 0 or not min(options.rates) > 0:
        parser.error("--l2 and --rates must be positive")
    return options


options = arguments()
if options.mpi:
    under_mpirun(options.ranks)

from mpi_examples.biased_report import TARGETS, Run, cells, favourite, picture, table  # noqa: E402

# -- who exchanges -----------------------------------------------------------------------------


class Lockstep:
    """All ranks in this process; the bytes are those of rank 0."""

    rank, size = 0, options.ranks

    def begin(self, compressor: Compressor) -> None:
        self.world = World(compressor, self.size)

    def step(self, gradient_of: Callable[[int], np.ndarray]) -> np.ndarray:
        gradients = [gradient_of(rank) for rank in range(self.size)]
        return self.world.exchange(gradients)[0].direction

    @property
    def bytes_sent(self) -> int:
        return self.world.record.bytes_sent

    def agree(self, value: Any) -> Any:
        return value


class OverMpi:
    """This process is one rank."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self.world = MPI.COMM_WORLD
        self.rank, self.size = self.world.rank, self.world.size

    def begin(self, compressor: Compressor) -> None:
        from hvd_compress import mpi

        self.reducer = mpi.Reducer(compressor)

    def step(self, gradient_of: Callable[[int], np.ndarray]) -> np.ndarray:
        return self.reducer.reduce({"tensor": gradient_of(self.rank)})["tensor"]

    @property
    def bytes_sent(self) -> int:
        return self.reducer.stats().total.bytes_sent

    def agree(self, value: Any) -> Any:
        """What rank 0 has, so that all stop together."""
        return self.world.bcast(value)


engine = OverMpi() if options.mpi else Lockstep()

# -- what is compared ---------------------------------------------------------------------------


@dataclasses.dataclass
class Operator:
    name: str
    method: Compressor
    classes: Classes
    kind: str  # plain, shared (the same choice on all ranks), feedback or ef21

    def theory(self, problem: Regression) -> float:
        """The step size that a theorem allows; those of plain and feedback are recalled."""
        smoothness, delta = problem.smoothness, self.classes.own_delta or math.inf
        if self.kind == "feedback":
            return FeedbackSteps(delta, smoothness, options.l2).constant
        if self.kind == "ef21":
            return ef21_step_size(delta, smoothness, problem.own_smoothness, options.l2)
        zeta = self.classes.zeta or math.inf
        if self.kind == "shared":
            return 1 / (zeta * smoothness)
        return 1 / (smoothness + 2 * (zeta - 1) * problem.own_smoothness / engine.size)


def operators(d: int) -> list[Operator]:
    dithering = natural_dithering(options.levels, None)
    coded = contraction(natural_dithering(max(options.levels // 2, 1), None))
    top, random = top_k(options.density), random_k(options.density)
    plain = {
        "dense": ("shared", allreduce()),
        "random-k, unbiased": ("shared", allreduce(select=random, unbiased=True)),
        "random-k, own draws": ("plain", gather_drawn(random, unbiased=True)),
        "natural compression": ("plain", allgather(natural())),
        "natural dithering": ("plain", allgather(dithering)),
    }
    fed_back = {
        "random-k": allreduce(select=random),
        "rounding to 3^i": allgather(rounding(3.0, biased=True)),
        "scaled sign": allgather(scaled_sign()),
        "top-k": allgather(top),
        "top-k + dithering": allgather(top, dithering),
        "top-k + coarse dithering": allgather(top, coded),
    }
    found = [
        Operator(name, NoCompression() if name == "dense" else chain(via=via), via.classes(d), kind)
        for name, (kind, via) in plain.items()
    ]
    for name, via in fed_back.items():
        method = chain(error_feedback(), via=via)
        found.append(Operator(f"EF {name}", method, via.classes(d), "feedback"))
    for name, via in (("top-k", allgather(top)), ("top-k + dithering", allgather(top, dithering))):
        method = EF21(options.density, values=via.values)
        found.append(Operator(f"EF21 {name}", method, via.classes(d), "ef21"))
    return found


def exchanged(
    problem: Regression, operator: Operator, w: np.ndarray, rank: int, rate: float
) -> np.ndarray:
    """Error feedback in units of steps, as in the paper: what is exchanged is rate * gradient."""
    gradient = problem.gradient(w, rank)
    return (rate * gradient if operator.kind == "feedback" else gradient).astype(np.float32)


def descend(problem: Regression, operator: Operator, rate: float, every: int = 5) -> Run:
    engine.begin(operator.method)
    path, w = Run(rate), problem.start
    for step in range(1, options.steps + 1):
        direction = engine.step(lambda rank: exchanged(problem, operator, w, rank, rate))  # noqa: B023
        w = w - (direction if operator.kind == "feedback" else rate * direction)
        path.steps = step
        if step % every == 0 or step == options.steps:
            path.errors.append(engine.agree(problem.error(w)))
            path.bytes_sent.append(engine.bytes_sent)
            if path.errors[-1] <= TARGETS[-1] or not path.errors[-1] < 10:
                break
    return path


def main() -> None:
    problem = Regression(engine.size, options.split, options.l2)
    every = operators(problem.d)
    rows, chosen = {}, {}
    total = len(every) * (len(options.rates) + 1)
    with tqdm(total=total, disable=engine.rank != 0, ncols=90, mininterval=1) as bar:
        for operator in every:
            bar.set_postfix_str(operator.name)
            runs = []
            rates = [rate / problem.smoothness for rate in options.rates]
            for rate in (*rates, operator.theory(problem)):
                runs.append(descend(problem, operator, rate))
                bar.update()
            *paths, theory = runs
            delta = operator.classes.own_delta
            rows[operator.name] = cells(delta, paths, theory, problem.smoothness)
            chosen[operator.name] = favourite(paths)
    if engine.rank:
        return
    print(
        f"\n{problem.d} weights, {engine.size} ranks, {options.split}; L / mu = "
        f"{problem.smoothness / options.l2:.0f}; density {options.density}, "
        f"{options.levels} levels\n"
        "kB that a rank sent until (f - f*) / (f(0) - f*) is so small and stays so, by the best of "
        f"the steps {', '.join(f'{rate:g}' for rate in options.rates)} / L:\n"
    )
    print(table(rows))
    dense = 4 * problem.d
    print(
        f"\na dense step is {human_bytes(dense)}; step * L: what is best to 1e-3; theory: "
        "the step that is proved to work, times L, and the error that it leaves"
    )
    title = f"Digits, {engine.size} ranks, {options.split}; step best to 1e-3"
    picture(chosen, title, options.output)
    print(f"picture: {options.output.resolve()}")


if __name__ == "__main__":
    main()
