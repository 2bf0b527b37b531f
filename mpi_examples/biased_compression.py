"""Biased compression: error per byte of a descent with many operators, and what inputs lose.

    python -m mpi_examples.biased_compression descent
    python -m mpi_examples.biased_compression descent --split labels --ranks 8 --mpi
    python -m mpi_examples.biased_compression inputs

After Beznosikov, Horvath, Richtarik and Safaryan, "On Biased Compression for Distributed Learning"
(JMLR 2023).

``descent`` is softmax regression with a ridge on scikit-learn's digits, by full gradients and
constant steps.  Every operator gets the same grid of step sizes, and bytes are counted from its
messages.  The ranks advance in lockstep in this process, or with --mpi as processes of their own.

``inputs`` compares operators on inputs as they are; what they promise is about the worst one.  A
row has the bits of a message per element, headers and indices included, and the relative error
|C(x) - x|^2 / |x|^2.  Unbiased operators have it also at the scale that makes it least.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch.nn import functional
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
from hvd_compress.cli.options import parser_of, picture_file, positive
from hvd_compress.cli.tables import text_table
from hvd_compress.codecs.selector import Classes
from hvd_compress.engines.local import LocalEngine
from hvd_compress.engines.lockstep import World
from hvd_compress.launch import under_mpirun
from hvd_compress.reduce import Reducer
from hvd_compress.stats import human_bytes
from hvd_compress.studies.step_sizes import FeedbackSteps, ef21_step_size, kept_by_top_k
from mpi_examples.data import Regression, digits
from mpi_examples.models import mlp
from mpi_examples.report import save
from mpi_examples.study import above_zero

DENSITY, LEVELS, L2 = 0.05, 7, 0.05
#: errors, of which the table has the bytes until they are reached
TARGETS = (1e-2, 1e-3, 1e-4, 1e-5)

# -- a descent -----------------------------------------------------------------------------------


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
            return FeedbackSteps(delta, smoothness, L2).constant
        if self.kind == "ef21":
            return ef21_step_size(delta, smoothness, problem.own_smoothness, L2)
        zeta = self.classes.zeta or math.inf
        if self.kind == "shared":
            return 1 / (zeta * smoothness)
        return 1 / (smoothness + 2 * (zeta - 1) * problem.own_smoothness / problem.ranks)


def operators(d: int) -> list[Operator]:
    dithering = natural_dithering(LEVELS, None)
    coded = contraction(natural_dithering(LEVELS // 2, None))
    top, random = top_k(DENSITY), random_k(DENSITY)
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
        method = EF21(DENSITY, values=via.values)
        found.append(Operator(f"EF21 {name}", method, via.classes(d), "ef21"))
    return found


@dataclasses.dataclass
class Descent:
    """Errors and bytes of one run, every few steps."""

    rate: float
    errors: list[float] = dataclasses.field(default_factory=lambda: [1.0])
    bytes_sent: list[int] = dataclasses.field(default_factory=lambda: [0])
    steps: int = 0

    def bytes_to(self, target: float) -> float:
        """Until the error is down to that, and stays so: some steps only pass by."""
        above = max(i for i, error in enumerate(self.errors) if not error <= target)
        return self.bytes_sent[above + 1] if above + 1 < len(self.errors) else math.inf


def descend(problem: Regression, operator: Operator, rate: float, steps: int, comm: Any) -> Descent:
    """Descend in lockstep, or as the rank that this process is in the communicator ``comm``."""
    if comm is None:
        ranks, world = range(problem.ranks), World(operator.method, problem.ranks)
    else:
        from hvd_compress import mpi  # imports MPI, which starts with it

        ranks, reducer = range(comm.rank, comm.rank + 1), mpi.Reducer(operator.method)
    # Error feedback in units of steps, as in the paper: what is exchanged is rate * gradient.
    before, behind = (rate, 1.0) if operator.kind == "feedback" else (1.0, rate)
    run, w = Descent(rate), problem.start
    for step in range(1, steps + 1):
        gradients = [(before * problem.gradient(w, r)).astype(np.float32) for r in ranks]
        if comm is None:
            w = w - behind * world.exchange(gradients)[0].direction
        else:
            w = w - behind * reducer.reduce({"w": gradients[0]})["w"]
        run.steps = step
        if step % 5 == 0 or step == steps:
            error = problem.error(w)
            run.errors.append(error if comm is None else comm.bcast(error))  # all stop together
            total = world.record if comm is None else reducer.stats().total
            run.bytes_sent.append(total.bytes_sent)
            if run.errors[-1] <= TARGETS[-1] or not run.errors[-1] < 10:
                break
    return run


def row(operator: Operator, runs: list[Descent], theory: Descent, smoothness: float) -> list[str]:
    def size(target: float) -> str:
        least = min(run.bytes_to(target) for run in runs)
        return "-" if math.isinf(least) else f"{least / 1000:,.1f}"

    best, delta = favourite(runs), operator.classes.own_delta
    return [
        operator.name,
        "-" if delta is None else f"{delta:.3g}",
        f"{best.bytes_sent[-1] / best.steps:,.0f}",
        *map(size, TARGETS),
        f"{min(min(run.errors) for run in runs):.1e}",
        f"{best.rate * smoothness:.3g}",
        f"{theory.rate * smoothness:.2g}",
        f"{theory.errors[-1]:.2g}",
    ]


def favourite(runs: list[Descent]) -> Descent:
    """The one that needs the fewest bytes to 1e-3, or else gets lowest."""
    return min(runs, key=lambda run: (run.bytes_to(TARGETS[1]), min(run.errors)))


def descent(options: argparse.Namespace) -> None:
    comm = None
    if options.mpi:
        under_mpirun(options.ranks)
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
    size, rank = (comm.size, comm.rank) if comm else (options.ranks, 0)
    problem = Regression(size, options.split, L2)
    rates = [rate / problem.smoothness for rate in options.rates]
    figure, axes = plt.subplots(figsize=(9, 4.6), layout="constrained")
    rows, every = [], operators(problem.d)
    bar = tqdm(every, disable=rank != 0, ncols=90, mininterval=1)
    for operator, color in zip(bar, plt.colormaps["tab20"].colors, strict=False):
        bar.set_postfix_str(operator.name)
        *runs, theory = [
            descend(problem, operator, rate, options.steps, comm)
            for rate in (*rates, operator.theory(problem))
        ]
        rows.append(row(operator, runs, theory, problem.smoothness))
        best, bold = favourite(runs), 2.5 if "top-k + dithering" in operator.name else 1.2
        kilobytes = np.array(best.bytes_sent) / 1000
        axes.plot(kilobytes[1:], best.errors[1:], color=color, label=operator.name, linewidth=bold)
    if rank:
        return
    steps = ", ".join(f"{rate:g}" for rate in options.rates)
    print(
        f"\n{problem.d} weights, {size} ranks, {options.split}; L / mu = "
        f"{problem.smoothness / L2:.0f}; density {DENSITY}, {LEVELS} levels\n"
        "kB that a rank sent until (f - f*) / (f(0) - f*) is so small and stays so, by the best of "
        f"the steps {steps} / L:\n"
    )
    targets = [f"to 1e{math.log10(target):.0f}" for target in TARGETS]
    header = "operator", "delta", "B/step", *targets, "lowest", "step*L", "theory", "its error"
    print(text_table(header, rows))
    print(
        f"\na dense step is {human_bytes(4 * problem.d)}; step * L: what is best to 1e-3; theory: "
        "the step that is proved to work, times L, and the error that it leaves"
    )
    axes.set(xscale="log", yscale="log", ylim=(TARGETS[-1] / 2, 2))
    axes.set(xlabel="sent by one rank [kB]", ylabel="(f - f*) / (f(0) - f*)")
    axes.set_title(f"Digits, {size} ranks, {options.split}; step best to 1e-3")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.02, 0.5))
    save(figure, options.output)


# -- inputs --------------------------------------------------------------------------------------

DENSITIES = (0.001, 0.01, 0.1, 0.3)
ELEMENTS, DRAWS = 100_000, 5


def families() -> dict[str, dict[str, Any]]:
    """Operators, from few bits to many; random-k draws elements that all ranks know."""
    coded = natural_dithering(LEVELS, 512)
    return {
        "random-k": {f"{k:.1%}": allreduce(select=random_k(k)) for k in DENSITIES},
        "top-k": {f"{k:.1%}": allgather(top_k(k)) for k in DENSITIES},
        "top-k + dithering": {f"{k:.1%}": allgather(top_k(k), coded) for k in DENSITIES},
        "natural dithering": {
            f"{levels} levels": allgather(natural_dithering(levels, 512)) for levels in (3, 5, 7)
        },
        "natural compression": {"": allgather(natural())},
        "scaled sign": {"": allgather(scaled_sign())},
    }


def gradients() -> list[np.ndarray]:
    """Gradients of the middle matrix of a network on the digits, after 50 steps of SGD and more."""
    torch.manual_seed(0)
    x, _, y, _ = digits(0)
    images, labels = torch.from_numpy(x), torch.from_numpy(y)
    model = mlp(x.shape[1:], 10)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found = []
    for step in range(50 + DRAWS):
        batch = torch.randint(len(images), (64,))
        sgd.zero_grad()
        functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        if step >= 50:
            found.append(model[3].weight.grad.numpy().reshape(-1).copy())
        sgd.step()
    return found


def every_input() -> dict[str, list[np.ndarray]]:
    random = np.random.default_rng(0)
    draw = {
        "normal": random.standard_normal,
        "exponential": random.standard_exponential,
        "uniform": lambda n: random.uniform(-1, 1, n),
    }
    found = {
        name: [of(ELEMENTS).astype(np.float32) for _ in range(DRAWS)] for name, of in draw.items()
    }
    return found | {"gradient": gradients()}


class Loss(NamedTuple):
    """Bits an element; the relative error as it is, and at the scale that makes it least."""

    bits: float
    error: float
    scaled: float

    def text(self) -> str:
        scaled = f" ({self.scaled:.3f})" if self.error - self.scaled > 5e-4 else ""
        return f"{self.error:.3f}{scaled}"


def loss(via: Any, xs: list[np.ndarray]) -> Loss:
    """Means over the inputs."""
    found = []
    for x in xs:
        reducer = Reducer(chain(via=via), LocalEngine())
        c = reducer.reduce({"x": x})["x"].astype(np.float64)
        square = float(x.astype(np.float64) @ x)
        sent = reducer.stats().total.bytes_sent
        least = 1 - float(c @ x) ** 2 / (float(c @ c) * square)
        found.append((8 * sent / len(x), float(((c - x) ** 2).sum()) / square, least))
    return Loss(*(statistics.mean(column) for column in zip(*found, strict=True)))


def inputs(options: argparse.Namespace) -> None:
    xs = every_input()
    figure, panels = plt.subplots(1, 4, figsize=(16, 4.4), sharey=True, layout="constrained")
    rows, kept = [], {}
    for family, members in families().items():
        found = {member: [loss(via, own) for own in xs.values()] for member, via in members.items()}
        for member, losses in found.items():
            texts = [one.text() for one in losses]
            rows.append((f"{family} {member}".strip(), f"{losses[0].bits:.2f}", *texts))
        for axes, losses in zip(panels, zip(*found.values(), strict=True), strict=True):
            axes.plot(*zip(*((x.bits, x.scaled) for x in losses), strict=True), "o-", label=family)
        if "1.0%" in found:
            kept[family] = [1 - one.error for one in found["1.0%"]]
    for density in DENSITIES:
        known = [f"{1 - kept_by_top_k(density, name):.3f}" for name in xs if name != "gradient"]
        rows.append((f"top-k {density:.1%}, in theory", "", *known, ""))
    print(f"relative errors; in brackets at the best scale. {DRAWS} draws of each input\n")
    print(text_table(("operator", "bits", *xs), rows))
    shares = zip(xs, kept["top-k"], kept["random-k"], strict=True)
    print("\nof |x|^2, 1 % by top-k keep so many times what random ones keep:", end=" ")
    print("; ".join(f"{name} {own / drawn:.1f}" for name, own, drawn in shares))
    for axes, name in zip(panels, xs, strict=True):
        title = f"{name} inputs" if name != "gradient" else "gradient of a network"
        axes.set(xscale="log", yscale="log", xlabel="bits an element", title=title)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("relative error, at the best scale")
    panels[-1].legend(fontsize="small")
    save(figure, options.output)


def main() -> None:
    parser = parser_of(__doc__)
    studies = parser.add_subparsers(required=True)
    own = studies.add_parser("descent", formatter_class=parser.formatter_class)
    own.set_defaults(study=descent)
    own.add_argument("--ranks", type=positive, default=4, help="when started without mpirun")
    own.add_argument("--mpi", action="store_true", help="ranks are processes, over MPI")
    own.add_argument(
        "--split",
        choices=["shuffled", "labels"],
        default="shuffled",
        help="which digits a rank has: any, or few kinds of them, so that gradients differ more",
    )
    own.add_argument("--steps", type=positive, default=400, help="at most, for each step size")
    own.add_argument(
        "--rates",
        type=above_zero,
        nargs="+",
        default=[2, 4, 8, 16],
        metavar="R",
        help="step sizes to try, in units of 1 / L",
    )
    other = studies.add_parser("inputs", formatter_class=parser.formatter_class)
    other.set_defaults(study=inputs)
    picture = Path("results/biased_compression.png")
    for study in (own, other):
        study.add_argument("--output", type=picture_file, default=picture)
    options = parser.parse_args()
    options.study(options)


if __name__ == "__main__":
    main()
