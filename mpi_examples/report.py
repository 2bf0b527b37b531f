"""Tables and pictures at the end of the examples."""

from __future__ import annotations

import dataclasses
import io
import math
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from PIL import Image
from tqdm import tqdm

from hvd_compress.stats import Stats
from mpi_examples import study

COLORS = plt.colormaps["tab10"].colors


@dataclasses.dataclass(frozen=True)
class Measure:
    """The score that says how good a model is."""

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
    seconds: float = 0.0
    elapsed: list[float] = dataclasses.field(default_factory=list)  # so far, untested, one an epoch
    test: float | None = None  # where the scores are of other data than the final one

    @property
    def final(self) -> float:
        return self.scores[-1] if self.test is None else self.test

    @property
    def steps(self) -> int:
        return len(self.losses)

    def end_epoch(self, score: float, stats: Stats, bar: tqdm) -> None:
        """Note how good the model is, and exact bytes, counted from the messages."""
        self.scores.append(score)
        self.bytes_sent.append(stats.total.bytes_sent)
        self.dense_bytes = stats.total.dense_bytes
        bar.set_postfix_str(f"{self.method}, seed {self.seed}: {self.measure.text(score)}")
        bar.update()

    def row(self) -> study.Run:
        """The final score, bytes of the whole run and of its last epoch, and time."""
        late = self.bytes_sent[-1] - (self.bytes_sent[-2] if len(self.bytes_sent) > 1 else 0)
        return {
            f"test {self.measure.name}": self.final,
            "sent per step": self.bytes_sent[-1] / self.steps,
            "ratio": self.dense_bytes / self.bytes_sent[-1],
            "in last epoch": late * len(self.bytes_sent) / self.steps,
            "late ratio": self.dense_bytes / (late * len(self.bytes_sent)),
            "time a step": self.seconds / self.steps,
        }


def table(runs: list[Run]) -> str:
    """One row a method."""
    groups, measure = by_method(runs), runs[0].measure
    columns: study.Columns = {
        f"test {measure.name}": lambda scores: study.spread(scores) + measure.unit,
        "sent per step": study.size,
        "ratio": study.times,
        "in last epoch": study.size,
        "late ratio": study.times,
        "time a step": study.milliseconds,
    }
    rows = {method: [run.row() for run in group] for method, group in groups.items()}
    seeds = max(map(len, groups.values()))
    end = (
        f"{seeds} runs a method; +- is one standard deviation" if seeds > 1 else "one run a method"
    )
    return f"{study.table(rows, columns)}\n{end}"


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


def picture(runs: list[Run], path: Path) -> None:
    """Scores over bytes sent, and training loss over steps; of many methods, what they end with."""
    groups = by_method(runs)
    save(_ends(groups) if len(groups) > len(COLORS) else _courses(groups), path)


def _courses(groups: dict[str, list[Run]]) -> plt.Figure:
    timed = all(run.elapsed for group in groups.values() for run in group)
    size = (11 + 5 * timed, 4.2)
    figure, panels = plt.subplots(1, 2 + timed, figsize=size, layout="constrained")
    left, right = panels[0], panels[1]
    for color, (method, group) in zip(COLORS, groups.items(), strict=False):
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
    """A line for each method: bytes, and what runs ended with, with one standard deviation."""
    size = (10, 1.5 + 0.22 * len(groups))
    figure, (left, right) = plt.subplots(1, 2, figsize=size, sharey=True, layout="constrained")
    for method, group in groups.items():
        left.barh(method, statistics.mean(run.bytes_sent[-1] / run.steps for run in group) / 2**10)
        ends = [run.final for run in group]
        deviation = statistics.stdev(ends) if len(ends) > 1 else 0.0
        right.errorbar(statistics.mean(ends), method, xerr=deviation, fmt="o", capsize=2)
    left.invert_yaxis()
    left.set(xscale="log", xlabel="sent by one rank [KiB a step]")
    right.set(xlabel=group[0].measure.axis("final test"))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    return figure


def save(figure: plt.Figure, path: Path) -> None:
    """Write a picture, say where, and forget it; PNG with few colours, which is a fraction of the
    size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    if path.suffix == ".png":
        figure.savefig(buffer, dpi=110)
        Image.open(buffer).convert("RGB").quantize(128).save(path, optimize=True)
    else:
        figure.savefig(path)
    plt.close(figure)
    print(f"\npicture: {path.resolve()}")


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
