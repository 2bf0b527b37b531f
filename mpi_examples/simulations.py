"""Ranks simulated in this process: three studies of methods beside what theory says of them.

    python -m mpi_examples.simulations exact_diffusion
    python -m mpi_examples.simulations prox_lead
    python -m mpi_examples.simulations leader_symmetry

``exact_diffusion``: node k of a graph minimises (x - b_k)^2 / 2 with noisy gradients.  The b_k lie
evenly between two ends, in the order of the nodes; b^2, the mean of their squares, says how much
the nodes' data differ.  Shown is the mean squared distance of the nodes from the common minimum.

``prox_lead``: nodes have the images of other digits than their neighbours, and minimise the mean
loss of a softmax regression with a ridge and an l1 term, whose solution is sparse.  With batches as
gradients a method stays in a ball around it; LSVRG takes their noise away.

``leader_symmetry``: two workers begin on the two sides of a hill, at 0.4 and -0.41, and minimise
f(x) = (x^2 - 1)^2, whose minima are at 1 and -1.  EASGD stays between them, Leader SGD leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from tqdm import tqdm

from hvd_compress.cli.options import parser_of, picture_file
from hvd_compress.cli.tables import text_table
from hvd_compress.studies import decentralized as theory
from hvd_compress.studies.estimators import LSVRG
from hvd_compress.systems import Ranks, TrainingMethod
from hvd_compress.systems.graphs import (
    EXTRA,
    LEAD,
    DecentralizedMethod,
    Diffusion,
    ExactDiffusion,
    as_topology,
    l1,
    simulate,
    spectral_gap,
)
from hvd_compress.systems.rounds import EASGD, LeaderSGD
from mpi_examples.data import Regression
from mpi_examples.report import save

# -- exact diffusion -----------------------------------------------------------------------------

GRAPHS, NODES = ("line", "cycle", "grid:rows=4", "complete"), 20
LR, VARIANCE, RUNS, STEPS = 0.1, 1.0, 400, 200
#: b^2
SQUARES = np.logspace(-3, 1, 5)


def targets(square: float) -> np.ndarray:
    """b_k of all nodes, with b^2 = square."""
    even = np.linspace(-1, 1, NODES)
    return even * np.sqrt(square / np.mean(even**2))


def expected(method: type[DecentralizedMethod], graph: str, square: float) -> float:
    """The distance by the closed form."""
    w = as_topology(graph).weights(NODES)
    if method is ExactDiffusion:
        return theory.exact_diffusion_msd(w, LR, VARIANCE)
    return sum(theory.diffusion_msd(w, targets(square), LR, VARIANCE))


def simulated(method: DecentralizedMethod) -> Iterator[tuple[float, float]]:
    """The mean over the runs, and half of its 95 % interval, for each b^2.  Every run and every b^2
    is a coordinate of its own, and the noise of each is drawn anew."""
    b = np.stack([targets(square) for square in SQUARES], axis=1).repeat(RUNS, axis=1)

    def gradient(rank: int, x: np.ndarray, step: int) -> np.ndarray:
        noise = np.random.default_rng([rank, step]).standard_normal(x.size)
        return x - b[rank] + VARIANCE**0.5 * noise

    x = simulate(method, gradient, np.zeros(b.shape), STEPS, LR)
    for distances in np.split((x**2).mean(axis=0), len(SQUARES)):  # the minimum is at 0
        yield float(distances.mean()), float(1.96 * distances.std(ddof=1) / RUNS**0.5)


def exact_diffusion(output: Path) -> None:
    colors = {Diffusion: "tab:orange", ExactDiffusion: "tab:blue"}
    figure, panels = plt.subplots(
        1, len(GRAPHS), figsize=(3.2 * len(GRAPHS), 3.8), sharey=True, layout="constrained"
    )
    rows, fine = [], np.logspace(-3, 1, 60)
    for axes, graph in zip(panels, tqdm(GRAPHS, ncols=90, leave=False), strict=True):
        gap = spectral_gap(as_topology(graph).weights(NODES))
        found = {method: list(simulated(method(graph))) for method in colors}
        for method, color in colors.items():
            closed = [expected(method, graph, square) for square in fine]
            axes.plot(fine, closed, color=color, label=method.name.replace("_", " "))
            axes.errorbar(
                SQUARES, *zip(*found[method], strict=True), color=color, fmt=".", capsize=2
            )
        axes.set(xscale="log", yscale="log", xlabel="b², how much the nodes' data differ")
        axes.set_title(f"{graph}, 1 - λ = {gap:.3g}")
        axes.grid(alpha=0.3)
        for i in (0, len(SQUARES) // 2, len(SQUARES) - 1):
            closed = [expected(method, graph, SQUARES[i]) for method in colors]
            intervals = [f"{found[m][i][0]:.4g} +- {found[m][i][1]:.2g}" for m in colors]
            rows.append(
                (
                    *(graph, f"{gap:.4f}", f"{SQUARES[i]:.3g}"),
                    *(f"{closed[0]:.4g}", intervals[0], f"{closed[1]:.4g}", intervals[1]),
                    f"{closed[0] / closed[1]:.3g}",
                )
            )
    print(
        f"{NODES} nodes, mu = {LR:g}, s^2 = {VARIANCE:g}; simulated: mean of {RUNS} runs +- 1.96 "
        "standard errors\n"
    )
    header = "graph", "1-lambda", "b^2", "diffusion, theory", "simulated", "exact, theory"
    print(text_table((*header, "simulated", "ratio"), rows))
    print("ratio: of the theory, diffusion to exact diffusion; above 1 the latter is better")
    panels[0].set_ylabel("mean squared distance")
    panels[0].legend(title="lines: theory; points: simulated")
    save(figure, output)


# -- an l1 term, 2 bits, and batches -------------------------------------------------------------

BATCHES = 8  # of a node, for LSVRG
Gradient = Callable[[int, np.ndarray, int], np.ndarray]


def gradient_of(name: str, problem: Regression) -> Gradient:
    """Exact, of a batch of the node, or estimated from it."""
    parts = [slice(i, None, BATCHES) for i in range(BATCHES)]  # images in the order of labels
    randoms = [np.random.default_rng(rank) for rank in range(problem.ranks)]

    def of(rank: int) -> Callable[[np.ndarray, int], np.ndarray]:
        return lambda x, part: problem.gradient(x, rank, parts[part])

    if name == "exact":
        return lambda rank, x, step: problem.gradient(x, rank)
    if name == "batches":
        return lambda rank, x, step: of(rank)(x, int(randoms[rank].integers(BATCHES)))
    nodes = [LSVRG(of(rank), BATCHES, randoms[rank]) for rank in range(problem.ranks)]
    return lambda rank, x, step: nodes[rank](x)


def solution(problem: Regression, weight: float) -> np.ndarray:
    """By proximal gradient descent on all data, which knows nothing of graphs."""
    x, prox, lr = problem.start, l1(weight), 1 / problem.smoothness
    for _ in range(100_000):
        last, x = x, prox(x - lr * problem.mean_gradient(x), lr)
        if abs(x - last).max() < 1e-14:
            break
    return x


def bytes_of(method: DecentralizedMethod, d: int) -> int:
    """Return the size of what a node sends to a neighbour in a step."""
    x = np.zeros(d)
    state = {key: np.zeros(d) for key in method.keys}
    update = method.update(x, x, state, method.topology.neighborhood(0, 2, 2))
    return next(update).payload.nbytes


def prox_lead() -> None:
    problem, weight, shown = Regression(8, "labels", l2=1.0), 0.02, (100, 200, 400)
    best, prox = solution(problem, weight), l1(weight)
    norm = float(np.linalg.norm(best)) * problem.ranks**0.5
    lead = LEAD("cycle", prox=prox)
    studied: dict[str, tuple[DecentralizedMethod, str]] = {
        "PG-EXTRA": (EXTRA("cycle", prox=prox), "exact"),
        "P2D2": (ExactDiffusion("cycle", prox=prox), "exact"),
        "Prox-LEAD": (lead, "exact"),
        "Prox-LEAD, batches": (lead, "batches"),
        "Prox-LEAD, LSVRG": (lead, "LSVRG"),
    }
    rows = []
    for name, (method, gradient) in tqdm(studied.items(), ncols=90, leave=False):
        errors: list[str] = []

        def observe(step: int, x: np.ndarray) -> None:
            if step in shown:
                errors.append(f"{np.linalg.norm(x - best) / norm:.1e}")  # noqa: B023

        start, lr = np.zeros((problem.ranks, problem.d)), 0.5 / problem.largest_smoothness
        simulate(method, gradient_of(gradient, problem), start, shown[-1], lr, observe=observe)
        rows.append((name, *errors, f"{bytes_of(method, problem.d):,}"))
    print(
        f"{problem.ranks} nodes of a cycle; {problem.d} weights, of which "
        f"{np.count_nonzero(abs(best) < 1e-9)} are 0 in the solution; step 0.5 / L\n"
        "relative distance of the nodes from it after so many steps, and the bytes of a message\n"
    )
    print(text_table(("method", *map(str, shown), "bytes"), rows))


# -- two workers and a hill ----------------------------------------------------------------------


def f(x: float) -> float:
    return (x**2 - 1) ** 2


def descend(method: TrainingMethod, lr: float) -> np.ndarray:
    """The places of both workers after each step, and in the last column the one that is tested."""
    start = (0.4, -0.41)
    world = Ranks(method, len(start))
    x = [{"x": np.array([own])} for own in start]
    if isinstance(method, EASGD):
        # Ranks usually begin at one point, which is the centre; these have theirs in the middle.
        world.states = [{"centre": {"x": np.zeros(1)}} for _ in start]
    path = [[*start, 0.0]]
    for _ in range(1500):
        gradients = [4 * own["x"] * (own["x"] ** 2 - 1) for own in x]
        pulled = world.before_step(x, losses=[f(own["x"][0]) for own in x])
        x = [{"x": own["x"] - lr * g} for own, g in zip(pulled, gradients, strict=True)]
        x = world.after_step(x)
        tested = world.consensus(x)[0]["x"][0]
        path.append([*(float(own["x"][0]) for own in x), float(tested)])
    return np.array(path)


def leader_symmetry(output: Path) -> None:
    lr, rho = 0.01, 1.5
    pull = lr * rho
    leader = LeaderSGD(local_every=1, global_every=1, global_pull=pull, local_pull=0, local_drift=0)
    elastic = EASGD(sync_every=1, alpha=pull, beta=2 * pull)
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    print(f"f(x) = (x^2 - 1)^2, lr {lr:g}, pull lr * {rho:g}")
    for axes, method in zip(panels, (elastic, leader), strict=True):
        path, name = descend(method, lr), "EASGD" if method is elastic else "Leader SGD"
        one, other, tested = (round(float(value), 4) + 0.0 for value in path[-1])
        print(f"{name}: workers {one:.4f} and {other:.4f}, tested {tested:.4f}, f {f(tested):.4f}")
        axes.plot(path[:, :2], label=["worker 0", "worker 1"])
        axes.plot(path[:, 2], "--", color="black", label="what is tested")
        axes.set(title=f"{name} on $(x^2 - 1)^2$", xlabel="step")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("x; the minima are at 1 and -1")
    panels[0].legend(loc=(0.6, 0.65))
    save(figure, output)


STUDIES = {
    "exact_diffusion": exact_diffusion,
    "prox_lead": prox_lead,
    "leader_symmetry": leader_symmetry,
}


def main() -> None:
    parser = parser_of(__doc__)
    studies = parser.add_subparsers(required=True)
    for name, study in STUDIES.items():
        own = studies.add_parser(name, formatter_class=parser.formatter_class)
        own.set_defaults(study=study)
        if study is not prox_lead:  # which draws nothing
            picture = Path("results/simulation.png")
            own.add_argument("--output", type=picture_file, default=picture)
    options = vars(parser.parse_args())
    options.pop("study")(**options)


if __name__ == "__main__":
    main()
