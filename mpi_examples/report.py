"""Tables, pictures and files at the end of the examples."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.text import Text
from matplotlib.ticker import LogLocator, NullLocator
from matplotlib.transforms import Bbox
from PIL import Image

from hvd_compress.cli.tables import text_table
from hvd_compress.stats import human_bytes
from mpi_examples.budget import reason
from mpi_examples.study import spread

# Where to write beside a point: right, left, above and below it, at its corners, then between.
_DIRECTIONS = np.array(
    [(1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1)]
    + [(x, y) for x in (1, -1) for y in (0.5, -0.5)]
    + [(x, y) for x in (0.5, -0.5) for y in (1, -1)]
)


@dataclasses.dataclass(frozen=True)
class Measure:
    """What says how good a model is."""

    name: str
    best: float  # what a perfect model has: all scores are on one side of it
    unit: str = ""
    during: str = "test"  # the data that it is measured on after every epoch

    def error(self, score: float) -> float:
        return abs(self.best - score)

    def score(self, error: float) -> float:
        return abs(self.best - error)

    def text(self, score: float) -> str:
        return f"{score:.2f}{self.unit}"

    def axis(self, data: str) -> str:
        return f"{data} {self.name}" + (f" [{self.unit.strip()}]" if self.unit else "")


ACCURACY = Measure("accuracy", 100.0, " %")
PERPLEXITY = Measure("perplexity", 0.0, during="validation")


@dataclasses.dataclass
class Run:
    """One training run, as rank 0 saw it."""

    method: str
    seed: int
    measure: Measure = ACCURACY
    losses: list[float] = dataclasses.field(default_factory=list)  # one a step
    scores: list[float] = dataclasses.field(default_factory=list)  # one an epoch
    bytes_sent: list[int] = dataclasses.field(default_factory=list)  # so far, one an epoch
    dense_bytes: int = 0
    steps: int = 0
    seconds: float = 0.0
    elapsed: list[float] = dataclasses.field(default_factory=list)  # so far, untested, one an epoch
    test: float | None = None  # where the scores are of other data than the final one

    @property
    def final(self) -> float:
        return self.scores[-1] if self.test is None else self.test

    @property
    def bytes_a_step(self) -> float:
        """Over the whole run, warm-up included."""
        return self.bytes_sent[-1] / self.steps

    @property
    def bytes_a_late_step(self) -> float:
        """In the last epoch."""
        epochs = len(self.bytes_sent)
        before = self.bytes_sent[-2] if epochs > 1 else 0
        return (self.bytes_sent[-1] - before) / (self.steps / epochs)


def table(runs: list[Run]) -> str:
    """One row a method: the final score, bytes of the whole run and of its last epoch, and time."""
    groups, measure = by_method(runs), runs[0].measure
    rows = []
    for method, group in groups.items():
        dense = group[0].dense_bytes / group[0].steps
        whole = statistics.mean(run.bytes_a_step for run in group)
        late = statistics.mean(run.bytes_a_late_step for run in group)
        rows.append(
            (
                method,
                spread([run.final for run in group]) + measure.unit,
                human_bytes(whole),
                f"{dense / whole:.1f}x",
                human_bytes(late),
                f"{dense / late:.1f}x",
                f"{statistics.median(1000 * run.seconds / run.steps for run in group):.1f} ms",
            )
        )
    header = "method", f"test {measure.name}", "sent a step", "ratio", "in last epoch", "ratio"
    seeds = max(map(len, groups.values()))
    end = (
        f"{seeds} runs a method; +- is one standard deviation" if seeds > 1 else "one run a method"
    )
    return f"{text_table((*header, 'time a step'), rows)}\n{end}"


def reached(runs: list[Run], points: float = 1.0) -> str:
    """After how many seconds of training each method is as good as the dense runs are in the end,
    but for so many points; on average, and of runs that know their seconds."""
    groups, measure = by_method([run for run in runs if run.elapsed]), runs[0].measure
    if "none" not in groups:
        return ""
    bound = statistics.mean(measure.error(run.final) for run in groups["none"]) + points
    found = []
    for method, group in groups.items():
        times = [
            next((t for t, x in zip(*course, strict=True) if measure.error(x) <= bound), math.inf)
            for course in ((run.elapsed, run.scores) for run in group)
        ]
        mean = statistics.mean(times)
        found.append(f"{method} " + (f"{mean:.1f} s" if mean < math.inf else "not reached"))
    return f"{measure.text(measure.score(bound))} after: {', '.join(found)}"


def behind(runs: list[Run], cut_short: bool = False, points: float = 1.0) -> str:
    """Methods that end worse than the dense run by more than so many points, and why that may be;
    ``cut_short``: because the runs ended before their warm-up did."""
    measure = runs[0].measure
    errors = {
        method: measure.error(statistics.mean(run.final for run in group))
        for method, group in by_method(runs).items()
    }
    dense = errors.get("none", math.inf)
    side = "below" if measure.best else "above"
    early = "the warm-up was cut short: more --epochs, or fewer --warmup-epochs"
    lines = [
        f"{method}: {error - dense:.1f} points {side} none; "
        + (early if cut_short else reason(method))
        for method, error in errors.items()
        if error > dense + points
    ]
    return "\n".join(["", *lines, ""]) if lines else ""


def save_runs(runs: list[Run], path: Path) -> None:
    """As JSON, for accuracy.py: what each run ended with, and what it cost."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found = [
        {
            "method": run.method,
            "seed": run.seed,
            "measure": dataclasses.asdict(run.measure),
            "final": run.final,
            "bytes_a_step": run.bytes_a_step,
            "bytes_a_late_step": run.bytes_a_late_step,
            "dense_bytes_a_step": run.dense_bytes / run.steps,
            "seconds_a_step": run.seconds / run.steps,
            "scores": run.scores,
            "elapsed": run.elapsed,
        }
        for run in runs
    ]
    path.write_text(json.dumps(found, indent=1) + "\n")


def picture(runs: list[Run], path: Path) -> None:
    """Scores over bytes sent, and training loss over steps; of many methods, what they end with."""
    groups = by_method(runs)
    save(_ends(groups) if len(groups) > 6 else _courses(groups), path)


def _courses(groups: dict[str, list[Run]]) -> plt.Figure:
    timed = all(run.elapsed for group in groups.values() for run in group)
    size = (11 + 5 * timed, 4.2)
    figure, panels = plt.subplots(1, 2 + timed, figsize=size, layout="constrained")
    left, right = panels[0], panels[1]
    for color, (method, group) in zip(plt.colormaps["tab10"].colors, groups.items(), strict=False):
        for number, run in enumerate(group):
            style = {"color": color, "alpha": 0.8, "label": None if number else method}
            megabytes = [count / 2**20 for count in run.bytes_sent]
            left.plot(megabytes, run.scores, marker=".", **style)
            right.plot(_smooth(run.losses), **style)
            if timed:
                panels[2].plot(run.elapsed, run.scores, marker=".", **style)
    measure = run.measure
    left.set(xscale="log", xlabel="sent by one rank [MiB]", ylabel=measure.axis(measure.during))
    left.set_title(f"{measure.name.capitalize()} over bytes")
    right.set(yscale="log", xlabel="step", ylabel="training loss (running mean)")
    right.set_title("Loss over steps")
    if timed:
        panels[2].set(xlabel="training [s]", ylabel=measure.axis(measure.during))
        panels[2].set_title(f"{measure.name.capitalize()} over time")
    for axes in panels:
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def _ends(groups: dict[str, list[Run]]) -> plt.Figure:
    """Scores against bytes.  Most methods are near the dense one: the scale is that of errors."""
    measure = next(iter(groups.values()))[0].measure
    figure, axes = plt.subplots(figsize=(11, 6.5), layout="constrained")
    names: dict[tuple[float, float], str] = {}
    for method, group in groups.items():
        kib = statistics.mean(run.bytes_a_step for run in group) / 2**10
        kib = float(f"{kib:.2g}")  # so that what is almost in one place has one label
        wrong = measure.error(statistics.mean(run.final for run in group))
        place = kib, max(wrong, 0.1)  # none at all has no place on this scale
        name = method.partition(":")[0]
        names[place] = f"{names[place]}, {name}" if place in names else name
    kibs, errors = zip(*names, strict=True)
    colors = ["black" if name.startswith("none") else "tab:blue" for name in names.values()]
    axes.scatter(kibs, errors, c=colors)
    axes.set(xscale="log", yscale="log", ylim=(0.9 * min(errors), 1.2 * max(errors)))
    axes.invert_yaxis()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda error, _: f"{measure.score(error):.4g}")
    axes.set(xlabel="sent by one rank [KiB a step]", ylabel=measure.axis("final test"))
    axes.set_title(f"{measure.name.capitalize()} against bytes")
    axes.grid(alpha=0.3)
    label(axes, names)
    return figure


def label(
    axes: plt.Axes,
    names: dict[tuple[float, float], str],
    deviations: dict[tuple[float, float], float] | None = None,
) -> list[plt.Annotation]:
    """Write a name beside each point, as near as it can be without covering a point, a name, the
    legend or an error bar; where there is no such place, as near as it can be on an error bar."""
    axes.figure.draw_without_rendering()  # until then nothing has its place
    pixels = axes.figure.dpi / 72  # of a point, the unit of lengths in print
    spots = {place: axes.transData.transform(place) for place in names}
    taken = [Bbox([spot - 4 * pixels, spot + 4 * pixels]) for spot in spots.values()]
    if (legend := axes.get_legend()) is not None:
        taken.append(legend.get_window_extent())
    ends = [
        axes.transData.transform([(x, y - own), (x, y + own)])
        for (x, y), own in (deviations or {}).items()
    ]
    bars = [Bbox([low - 3 * pixels, high + 3 * pixels]) for low, high in ends]
    labels = []
    for place, name in sorted(names.items()):
        text = axes.annotate(
            name,
            place,
            (0, 0),
            textcoords="offset points",
            fontsize=8,
            ha="center",
            va="center",
            arrowprops={"arrowstyle": "-", "color": "gray", "lw": 0.5},
        )
        size = np.array(Text.get_window_extent(text).size) + 2 * pixels
        around = itertools.product(range(5, 160, 5), _DIRECTIONS)
        offsets = [direction * (size / 2 + distance * pixels) for distance, direction in around]
        boxes = [
            (offset, Bbox.from_bounds(*(spots[place] + offset - size / 2), *size))
            for offset in offsets
        ]
        free = [
            (offset, box)
            for offset, box in boxes
            if axes.bbox.contains(*box.min)
            and axes.bbox.contains(*box.max)
            and not box.count_overlaps(taken)
        ]
        clear = [(offset, box) for offset, box in free if not box.count_overlaps(bars)]
        offset, box = (clear or free or boxes)[0]
        text.set_position(offset / pixels)
        taken.append(box)
        labels.append(text)
    return labels


def save(figure: plt.Figure, path: Path) -> None:
    """Write a picture and forget it; PNG with few colours, which is a fraction of the size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    if path.suffix == ".png":
        figure.savefig(buffer, dpi=110)
        Image.open(buffer).convert("RGB").quantize(128).save(path, optimize=True)
    else:
        figure.savefig(path)
    plt.close(figure)


def by_method(runs: list[Run]) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.method, []).append(run)
    return groups


def _smooth(values: list[float], keep: float = 0.9) -> list[float]:
    smoothed, mean = [], values[0]
    for value in values:
        mean = keep * mean + (1 - keep) * value
        smoothed.append(max(mean, 1e-6))
    return smoothed
