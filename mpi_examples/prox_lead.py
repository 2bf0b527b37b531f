"""Prox-LEAD beside PG-EXTRA and P2D2, with exact and with stochastic gradients.

    python -m mpi_examples.prox_lead
    python -m mpi_examples.prox_lead --methods extra p2d2 lead --topology grid --steps 1000

The nodes of a graph have the images of other digits than their neighbours, and minimise the mean
loss of a softmax regression with a ridge and an l1 term, whose solution is sparse.  With batches as
gradients a method stays in a ball around it; LSVRG and SAGA take their noise away.  All nodes run
in this process.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
from tqdm import tqdm

from hvd_compress.cli.options import parser_of
from hvd_compress.errors import ConfigError
from hvd_compress.studies.estimators import LSVRG, SAGA
from hvd_compress.systems.graphs import (
    EXTRA,
    LEAD,
    DecentralizedMethod,
    ExactDiffusion,
    blockwise,
    l1,
    simulate,
)
from mpi_examples.regression import Regression
from mpi_examples.study import check_counts

METHODS: dict[str, str] = {
    "extra": "PG-EXTRA",
    "p2d2": "P2D2",
    "lead": "Prox-LEAD",
    "lead+batches": "Prox-LEAD, batches",
    "lead+lsvrg": "Prox-LEAD, LSVRG",
    "lead+saga": "Prox-LEAD, SAGA",
}
Gradient = Callable[[int, np.ndarray, int], np.ndarray]


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    names = [*METHODS]
    parser.add_argument("--methods", nargs="+", choices=names, default=names, metavar="METHOD")
    parser.add_argument("--topology", default="cycle")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--batches", type=int, default=8, help="of a node, for LSVRG and SAGA")
    parser.add_argument("--bits", type=int, default=2, help="an element, of Prox-LEAD")
    parser.add_argument("--l1", type=float, default=0.02, help="weight of |x|_1")
    parser.add_argument("--l2", type=float, default=1.0, help="weight of |x|_2^2 / 2")
    parser.add_argument("--lr", type=float, default=0.5, help="in units of 1 / L")
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    check_counts(parser, options, "nodes", "batches", "steps")
    try:
        ExactDiffusion(options.topology).check_ranks(options.nodes)
        blockwise(options.bits)
        l1(options.l1)
    except ConfigError as error:
        parser.error(str(error))
    if not options.l2 > 0 or not options.lr > 0:
        parser.error("--l2 and --lr must be more than 0")
    return options


def method_of(name: str, options: argparse.Namespace) -> DecentralizedMethod:
    graph, prox = options.topology, l1(options.l1)
    if name.startswith("lead"):
        return LEAD(graph, blockwise(options.bits), prox=prox)
    return (EXTRA if name == "extra" else ExactDiffusion)(graph, prox=prox)


def gradient_of(name: str, problem: Regression, batches: int) -> Gradient:
    """Exact, of a batch of the node, or estimated from it."""
    parts = [slice(i, None, batches) for i in range(batches)]  # images in the order of labels
    randoms = [np.random.default_rng(rank) for rank in range(problem.ranks)]
    kind = name.partition("+")[2]
    if not kind:
        return lambda rank, x, step: problem.gradient(x, rank)

    def of(rank: int) -> Callable[[np.ndarray, int], np.ndarray]:
        return lambda x, part: problem.gradient(x, rank, parts[part])

    if kind == "batches":
        return lambda rank, x, step: of(rank)(x, int(randoms[rank].integers(batches)))
    estimator = {"lsvrg": LSVRG, "saga": SAGA}[kind]
    nodes = [estimator(of(rank), batches, randoms[rank]) for rank in range(problem.ranks)]
    return lambda rank, x, step: nodes[rank](x)


def solution(problem: Regression, weight: float) -> np.ndarray:
    """By proximal gradient descent on all data, which knows nothing of graphs."""
    x, prox, rate = problem.start, l1(weight), 1 / problem.smoothness
    for _ in range(100_000):
        last, x = x, prox(x - rate * problem.mean_gradient(x), rate)
        if abs(x - last).max() < 1e-14:
            break
    return x


def main() -> None:
    options = arguments()
    problem = Regression(options.nodes, "labels", options.l2)
    best = solution(problem, options.l1)
    rate, steps = options.lr / problem.largest_smoothness, options.steps
    norm = float(np.linalg.norm(best)) * options.nodes**0.5
    shown = sorted({max(steps // 4, 1), max(steps // 2, 1), steps})
    print(
        f"{options.nodes} nodes, {options.topology}; {problem.d} weights, of which "
        f"{np.count_nonzero(abs(best) < 1e-9)} are 0 in the solution; step {options.lr:g} / L\n"
        "relative distance of the nodes from it after so many steps, and the bytes of a message\n"
    )
    width = max(map(len, METHODS.values()))
    head = f"{'method':{width}}" + "".join(f" {step:>9}" for step in shown) + f" {'bytes':>7}"
    print(head, "-" * len(head), sep="\n")
    for name in tqdm(options.methods, ncols=90, leave=False):
        errors: dict[int, float] = {}

        def observe(step: int, x: np.ndarray) -> None:
            if step in shown:
                errors[step] = float(np.linalg.norm(x - best)) / norm  # noqa: B023

        method, gradient = method_of(name, options), gradient_of(name, problem, options.batches)
        start = np.zeros((options.nodes, problem.d))
        simulate(method, gradient, start, steps, rate, observe=observe)
        line = f"{METHODS[name]:{width}}" + "".join(f" {errors[step]:>9.1e}" for step in shown)
        tqdm.write(f"{line} {bytes_of(method, problem.d):>7,}")


def bytes_of(method: DecentralizedMethod, d: int) -> int:
    """Of what a node sends to a neighbour in a step."""
    x = np.zeros(d)
    update = method.update(x, x, dict(method.start(x)), method.network(0, 2, 1)._replace(step=2))
    return next(update).payload.nbytes


if __name__ == "__main__":
    main()
