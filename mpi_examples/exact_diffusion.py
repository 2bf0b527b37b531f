"""When exact diffusion pays: its steady state beside that of diffusion, simulated and in theory.

    python -m mpi_examples.exact_diffusion --output docs/exact-diffusion.png

Node k of a graph minimises (x - b_k)^2 / 2 with noisy gradients.  The b_k lie evenly between two
ends, in the order of the nodes; b^2, the mean of their squares, says how much the nodes' data
differ.  Shown is the mean squared distance of the nodes from the common minimum.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from tqdm import tqdm

from hvd_compress.cli.options import parser_of, picture_file
from hvd_compress.errors import ConfigError
from hvd_compress.studies import decentralized as theory
from hvd_compress.systems.graphs import (
    DecentralizedMethod,
    Diffusion,
    ExactDiffusion,
    as_topology,
    simulate,
    spectral_gap,
)
from mpi_examples.report import save

METHODS = (Diffusion, ExactDiffusion)


class Point(NamedTuple):
    """The distance at one b^2: by the closed form, and simulated with its standard error."""

    expected: float
    mean: float
    error: float


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    graphs = ["line", "cycle", "grid:rows=4", "complete"]
    parser.add_argument("--graphs", nargs="+", default=graphs, metavar="GRAPH")
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.1, help="mu, below 1")
    parser.add_argument("--variance", type=float, default=1.0, help="s^2 of the gradients' noise")
    parser.add_argument("--runs", type=int, default=400, help="simulated for each point")
    parser.add_argument("--steps", type=int, default=200, help="until the distance is taken")
    parser.add_argument("--output", type=picture_file, default=Path("results/exact-diffusion.png"))
    options = parser.parse_args()
    if options.nodes < 2 or options.runs < 2 or options.steps < 1:
        parser.error("--nodes and --runs must be 2 or more, --steps 1 or more")
    if not 0 < options.lr < 1 or options.variance <= 0:
        parser.error("--lr must be in (0, 1), and --variance more than 0")
    try:
        for graph in options.graphs:
            as_topology(graph).weights(options.nodes)
    except ConfigError as error:
        parser.error(f"--graphs: {error}")
    return options


def targets(nodes: int, square: float) -> np.ndarray:
    """b_k of all nodes, with b^2 = square."""
    even = np.linspace(-1, 1, nodes)
    return even * np.sqrt(square / np.mean(even**2))


def expected(
    method: type[DecentralizedMethod], w: np.ndarray, b: np.ndarray, options: argparse.Namespace
) -> float:
    """The distance by the closed form."""
    if method is ExactDiffusion:
        return theory.exact_diffusion_msd(w, options.lr, options.variance)
    return sum(theory.diffusion_msd(w, b, options.lr, options.variance))


def simulated(
    method: DecentralizedMethod, squares: np.ndarray, options: argparse.Namespace, bar: tqdm
) -> Iterator[tuple[float, float]]:
    """The mean over the runs, and its standard error, for each b^2.  Every run and every b^2 is a
    coordinate of its own, and the noise of each is drawn anew."""
    nodes, runs = options.nodes, options.runs
    b = np.stack([targets(nodes, square) for square in squares], axis=1).repeat(runs, axis=1)
    deviation = options.variance**0.5

    def gradient(rank: int, x: np.ndarray, step: int) -> np.ndarray:
        noise = np.random.default_rng([rank, step]).standard_normal(x.size)
        return x - b[rank] + deviation * noise

    x = simulate(
        method,
        gradient,
        np.zeros(b.shape),
        options.steps,
        options.lr,
        observe=lambda *_: bar.update(),
    )
    for distances in np.split((x**2).mean(axis=0), len(squares)):  # the minimum is at 0
        yield float(distances.mean()), float(distances.std(ddof=1) / runs**0.5)


def main() -> None:
    options = arguments()
    squares = np.logspace(-3, 1, 5)
    points: dict[tuple[str, str], list[Point]] = {}
    total = len(options.graphs) * len(METHODS) * options.steps
    with tqdm(total=total, unit="step", ncols=90, mininterval=1) as bar:
        for graph in options.graphs:
            w = as_topology(graph).weights(options.nodes)
            for method in METHODS:
                closed = [
                    expected(method, w, targets(options.nodes, square), options)
                    for square in squares
                ]
                found = simulated(method(graph), squares, options, bar)
                points[graph, method.name] = [
                    Point(e, *each) for e, each in zip(closed, found, strict=True)
                ]
    print(
        f"\n{options.nodes} nodes, mu = {options.lr:g}, s^2 = {options.variance:g}; simulated: "
        f"mean of {options.runs} runs +- 1.96 standard errors\n"
    )
    print(table(points, squares, options))
    save(picture(points, squares, options), options.output)
    print(f"picture: {options.output.resolve()}")


def table(
    points: dict[tuple[str, str], list[Point]], squares: np.ndarray, options: argparse.Namespace
) -> str:
    """One row for each graph, of the first, the middle and the last b^2."""
    header = (
        f"{'graph':<12} {'1-lambda':>8} {'b^2':>6} {'diffusion, theory':>18} {'simulated':>20}"
        f" {'exact, theory':>14} {'simulated':>20} {'ratio':>7}"
    )
    lines = [header, "-" * len(header)]
    for graph in options.graphs:
        gap = spectral_gap(as_topology(graph).weights(options.nodes))
        for place in (0, len(squares) // 2, len(squares) - 1):
            biased, exact = (points[graph, method.name][place] for method in METHODS)
            lines.append(
                f"{graph:<12} {gap:>8.4f} {squares[place]:>6.3g} {biased.expected:>18.4g}"
                f" {_interval(biased):>20} {exact.expected:>14.4g} {_interval(exact):>20}"
                f" {biased.expected / exact.expected:>7.3g}"
            )
    lines.append("ratio: of the theory, diffusion to exact diffusion; above 1 the latter is better")
    return "\n".join(lines)


def _interval(point: Point) -> str:
    return f"{point.mean:.4g} +- {1.96 * point.error:.2g}"


def picture(
    points: dict[tuple[str, str], list[Point]], squares: np.ndarray, options: argparse.Namespace
) -> plt.Figure:
    count = len(options.graphs)
    figure, all_axes = plt.subplots(
        1, count, figsize=(3.2 * count, 3.8), sharey=True, squeeze=False, layout="constrained"
    )
    fine = np.logspace(np.log10(squares[0]), np.log10(squares[-1]), 60)
    for axes, graph in zip(all_axes[0], options.graphs, strict=True):
        w = as_topology(graph).weights(options.nodes)
        for method, color in zip(METHODS, ("tab:orange", "tab:blue"), strict=True):
            found = points[graph, method.name]
            label = method.name.replace("_", " ")
            closed = [
                expected(method, w, targets(options.nodes, square), options) for square in fine
            ]
            axes.plot(fine, closed, color=color, label=label)
            axes.errorbar(
                squares,
                [p.mean for p in found],
                [1.96 * p.error for p in found],
                color=color,
                fmt=".",
                capsize=2,
            )
        gap = spectral_gap(w)
        axes.set(xscale="log", yscale="log", xlabel="b², how much the nodes' data differ")
        axes.set_title(f"{graph}, 1 - λ = {gap:.3g}")
        axes.grid(alpha=0.3)
    all_axes[0][0].set_ylabel("mean squared distance")
    all_axes[0][0].legend(title="lines: theory; points: simulated")
    return figure


if __name__ == "__main__":
    main()
