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
from scipy.optimize import minimize
from sklearn.datasets import load_digits
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
from hvd_compress.cli.options import picture_file
from hvd_compress.engines.base import payload_bytes, watched
from hvd_compress.engines.lockstep import World
from hvd_compress.integrations.launch import under_mpirun
from hvd_compress.operator_classes import Classes, FeedbackSteps, ef21_step_size
from hvd_compress.stats import human_bytes
from mpi_examples.study import check_counts

TARGETS = (1e-2, 1e-3, 1e-4, 1e-5)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
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

import matplotlib.pyplot as plt  # noqa: E402

from mpi_examples.report import save  # noqa: E402

# -- who exchanges -----------------------------------------------------------------------------


class Lockstep:
    """All ranks in this process; the bytes are those of rank 0."""

    rank, size = 0, options.ranks

    def begin(self, compressor: Compressor) -> None:
        self.counter = Counter(compressor)
        self.world = World(self.counter, self.size)

    def step(self, gradient_of: Callable[[int], np.ndarray]) -> np.ndarray:
        gradients = [gradient_of(rank) for rank in range(self.size)]
        return self.world.exchange(gradients)[0].direction

    @property
    def bytes_sent(self) -> int:
        return self.counter.bytes_sent

    def agree(self, value: Any) -> Any:
        return value


class Counter:
    """A compressor that counts what rank 0 sends."""

    def __init__(self, compressor: Compressor) -> None:
        self.compressor, self.bytes_sent = compressor, 0
        self.init, self.needs_gradient_norm = compressor.init, compressor.needs_gradient_norm

    def for_tensor(self, name: str, shape: tuple[int, ...]) -> Counter:
        return self

    def exchange(self, gradient: np.ndarray, state: Any, context: Any) -> Any:
        def count(request: Any, reply: Any) -> None:
            if context.rank == 0:
                self.bytes_sent += payload_bytes(request)

        return (yield from watched(self.compressor.exchange(gradient, state, context), count))


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

# -- what is minimised -------------------------------------------------------------------------


class Regression:
    """Multinomial logistic regression with an L2 term: 65 x 10 weights."""

    def __init__(self) -> None:
        x, labels = load_digits(return_X_y=True)
        x = (x - x.mean()) / x.std()
        x = np.column_stack([x, np.ones(len(x))])
        order = np.random.default_rng(0).permutation(len(x))
        if options.split == "labels":
            order = np.argsort(labels, kind="stable")
        order = order[: len(x) // engine.size * engine.size]
        self.x = x[order].reshape(engine.size, -1, 65)
        self.y = np.eye(10)[labels[order]].reshape(engine.size, -1, 10)
        # The Hessian of the softmax is at most 1/2.
        grams = np.einsum("rna,rnb->rab", self.x, self.x) / self.x.shape[1]
        own = np.linalg.eigvalsh(grams)[:, -1] / 2 + options.l2
        self.own_smoothness = math.sqrt(np.mean(own**2))
        self.smoothness = float(np.linalg.eigvalsh(grams.mean(0))[-1]) / 2 + options.l2
        self.d = 650
        self.start = np.zeros(self.d)
        found = minimize(
            lambda w: (self.value(w), np.mean([self.gradient(w, r) for r in ranks], axis=0)),
            self.start,
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": 5000, "ftol": 1e-16, "gtol": 1e-10},
        )
        self.least, self.most = found.fun, self.value(self.start)

    def value(self, w: np.ndarray) -> float:
        z = self.x @ w.reshape(65, 10)
        top = z.max(2)
        log_sum = np.log(np.exp(z - top[..., None]).sum(2)) + top
        return float((log_sum - (z * self.y).sum(2)).mean() + options.l2 / 2 * w @ w)

    def gradient(self, w: np.ndarray, rank: int) -> np.ndarray:
        """Of one rank's part."""
        x, y = self.x[rank], self.y[rank]
        z = x @ w.reshape(65, 10)
        p = np.exp(z - z.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        return (x.T @ (p - y) / len(x)).reshape(-1) + options.l2 * w

    def error(self, w: np.ndarray) -> float:
        """How much of f(start) - f(best) is left."""
        return (self.value(w) - self.least) / (self.most - self.least)


ranks = range(engine.size)


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


@dataclasses.dataclass
class Run:
    """Errors and bytes of one run, every few steps."""

    rate: float
    errors: list[float] = dataclasses.field(default_factory=lambda: [1.0])
    bytes_sent: list[int] = dataclasses.field(default_factory=lambda: [0])
    steps: int = 0

    def bytes_to(self, target: float) -> float:
        """Until the error is down to that, and stays so: some steps only pass by."""
        above = max(i for i, error in enumerate(self.errors) if not error <= target)
        return self.bytes_sent[above + 1] if above + 1 < len(self.errors) else math.inf

    @property
    def lowest(self) -> float:
        return min(self.errors)


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


# -- what comes out ----------------------------------------------------------------------------


def cells(operator: Operator, paths: list[Run], theory: Run, problem: Regression) -> list[str]:
    def size(target: float) -> str:
        least = min(path.bytes_to(target) for path in paths)
        return "-" if math.isinf(least) else f"{least / 1000:,.1f}"

    best = favourite(paths)
    delta = operator.classes.own_delta
    return [
        "-" if delta is None else f"{delta:.3g}",
        f"{best.bytes_sent[-1] / best.steps:,.0f}",
        *map(size, TARGETS),
        f"{min(path.lowest for path in paths):.1e}",
        f"{best.rate * problem.smoothness:.3g}",
        f"{theory.rate * problem.smoothness:.2g}",
        f"{theory.errors[-1]:.2g}",
    ]


def favourite(paths: list[Run]) -> Run:
    """The one that needs the fewest bytes to 1e-3, or else gets lowest."""
    return min(paths, key=lambda path: (path.bytes_to(TARGETS[1]), path.lowest))


def table(rows: dict[str, list[str]]) -> str:
    head = ["delta", "B/step", *(f"to 1e{math.log10(target):.0f}" for target in TARGETS)]
    head += ["lowest", "step*L", "theory", "its error"]
    width = max(map(len, rows))
    lines = [f"{'operator':{width}}" + "".join(f" {word:>9}" for word in head)]
    lines.append("-" * len(lines[0]))
    lines += [
        f"{name:{width}}" + "".join(f" {word:>9}" for word in row) for name, row in rows.items()
    ]
    return "\n".join(lines)


HESSIAN = np.array([1, 3.25, 5.5, 7.75, 10])
ROWS = np.array([[-3.0, 2, 2], [2, -3, 2], [2, 2, -3]])
SINGLE = {
    "top-1": allgather(top_k(0.2)),
    "top-2": allgather(top_k(0.4)),
    "rounding to 2^i": allgather(rounding(2.0, biased=True)),
}


def one_node(via: Any, steps: int = 60) -> np.ndarray:
    """f by steps, for f = x H x / 2 from x = 1."""
    world, x, values = World(chain(via=via), 1), np.ones(5), []
    for _ in range(steps):
        values.append(x @ (HESSIAN * x) / 2)
        x = x - world.exchange([HESSIAN * x])[0].mean / 10
    return np.array(values)


def three_nodes(method: Compressor, rate: float = 0.02, steps: int = 400) -> np.ndarray:
    """|x| by steps, for f_i = <a_i, x>^2 + |x|^2 / 4, where Top-1 alone goes uphill."""
    world, x, norms = World(method, 3), np.ones(3), []
    for _ in range(steps):
        norms.append(np.linalg.norm(x))
        gradients = 2 * (ROWS @ x)[:, None] * ROWS + x / 2
        x = x - rate * world.exchange(list(gradients))[0].direction
    return np.array(norms)


def picture(chosen: dict[str, Run]) -> None:
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(16, 4.6), layout="constrained")
    for color, (name, via) in zip(plt.colormaps["tab10"].colors, SINGLE.items(), strict=False):
        values, delta = one_node(via), via.classes(5).delta
        left.plot(values, color=color, label=name)
        bound = values[0] * (1 - 0.1 / delta) ** np.arange(len(values))
        left.plot(bound, "--", color=color, label=f"bound, delta = {delta:.3g}")
    left.set(yscale="log", ylim=(1e-8, 30), xlabel="step", ylabel="f - f*")
    left.set_title("One node, step 1 / L")
    top_1 = allgather(top_k(1 / 3))
    for (name, method), style in zip(
        {
            "top-1": chain(via=top_1),
            "EF top-1": chain(error_feedback(), via=top_1),
            "EF21 top-1": EF21(1 / 3, start=1),
        }.items(),
        ("-", "-", "--"),
        strict=True,
    ):
        middle.plot(three_nodes(method), style, label=name)
    middle.set(yscale="log", xlabel="step", ylabel="|x - x*|", title="Three nodes that disagree")
    colors = plt.colormaps["tab20"].colors
    for color, (name, path) in zip(colors, chosen.items(), strict=False):
        kilobytes = np.array(path.bytes_sent) / 1000
        bold = 2.5 if "top-k + dithering" in name else 1.2
        right.plot(kilobytes[1:], path.errors[1:], color=color, label=name, linewidth=bold)
    right.set(xscale="log", yscale="log", ylim=(TARGETS[-1] / 2, 2))
    right.set(xlabel="sent by one rank [kB]", ylabel="(f - f*) / (f(0) - f*)")
    right.set_title(f"Digits, {engine.size} ranks, {options.split}; step best to 1e-3")
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
    for axes in (left, middle):
        axes.legend(fontsize="small")
    right.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.02, 0.5))
    save(figure, options.output)


def main() -> None:
    problem = Regression()
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
            rows[operator.name] = cells(operator, paths, theory, problem)
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
    picture(chosen)
    print(f"picture: {options.output.resolve()}")


if __name__ == "__main__":
    main()
