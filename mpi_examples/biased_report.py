"""What ``biased_compression.py`` shows: its runs, the table, and the picture."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from hvd_compress import EF21, Compressor
from hvd_compress.blocks import allgather, chain, error_feedback, rounding, top_k
from hvd_compress.cli.tables import text_table
from hvd_compress.engines.lockstep import World
from mpi_examples.report import save

TARGETS = (1e-2, 1e-3, 1e-4, 1e-5)


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


def cells(delta: float | None, paths: list[Run], theory: Run, smoothness: float) -> list[str]:
    """One row of the table."""

    def size(target: float) -> str:
        least = min(path.bytes_to(target) for path in paths)
        return "-" if math.isinf(least) else f"{least / 1000:,.1f}"

    best = favourite(paths)
    return [
        "-" if delta is None else f"{delta:.3g}",
        f"{best.bytes_sent[-1] / best.steps:,.0f}",
        *map(size, TARGETS),
        f"{min(path.lowest for path in paths):.1e}",
        f"{best.rate * smoothness:.3g}",
        f"{theory.rate * smoothness:.2g}",
        f"{theory.errors[-1]:.2g}",
    ]


def favourite(paths: list[Run]) -> Run:
    """The one that needs the fewest bytes to 1e-3, or else gets lowest."""
    return min(paths, key=lambda path: (path.bytes_to(TARGETS[1]), path.lowest))


def table(rows: dict[str, list[str]]) -> str:
    head = ["delta", "B/step", *(f"to 1e{math.log10(target):.0f}" for target in TARGETS)]
    head += ["lowest", "step*L", "theory", "its error"]
    return text_table(("operator", *head), [(name, *row) for name, row in rows.items()])


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


def picture(chosen: dict[str, Run], title: str, path: Path) -> None:
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
    for color, (name, run) in zip(colors, chosen.items(), strict=False):
        kilobytes = np.array(run.bytes_sent) / 1000
        bold = 2.5 if "top-k + dithering" in name else 1.2
        right.plot(kilobytes[1:], run.errors[1:], color=color, label=name, linewidth=bold)
    right.set(xscale="log", yscale="log", ylim=(TARGETS[-1] / 2, 2))
    right.set(xlabel="sent by one rank [kB]", ylabel="(f - f*) / (f(0) - f*)")
    right.set_title(title)
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
    for axes in (left, middle):
        axes.legend(fontsize="small")
    right.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.02, 0.5))
    save(figure, path)
