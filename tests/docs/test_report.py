"""What the examples say at the end: names in pictures, and reasons."""

from __future__ import annotations

import itertools

import matplotlib.pyplot as plt
import pytest
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from mpi_examples.report import PERPLEXITY, Run, behind, label, picture, reached, table

CROWD = {
    "two almost in one place": {(170.0, 1.67): "efsignsgd", (180.0, 1.67): "onebit"},
    "a row": {(100.0 * 1.1**i, 2.0): f"method {i}" for i in range(12)},
    "a heap": {
        (10 ** (2 + x / 10), 10 ** (y / 10)): f"name {x} {y}" for x in range(5) for y in range(5)
    },
    "corners": {(x, y): "long enough a name" for x in (1.0, 1000.0) for y in (0.1, 100.0)},
}


@pytest.mark.parametrize("names", CROWD.values(), ids=CROWD)
def test_names_cover_neither_points_nor_each_other(names):
    figure, axes = plt.subplots(figsize=(11, 6.5), layout="constrained")
    axes.scatter(*zip(*names, strict=True))
    axes.set(xscale="log", yscale="log", xlim=(1, 5000), ylim=(0.05, 200))
    labels = label(axes, names)
    assert sorted(text.get_text() for text in labels) == sorted(names.values())
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in labels]
    for one, other in itertools.combinations(boxes, 2):
        assert not one.overlaps(other)
    for box in boxes:
        assert axes.bbox.contains(*box.min)
        assert axes.bbox.contains(*box.max)
        assert not any(box.contains(*axes.transData.transform(place)) for place in names)
    plt.close(figure)


def test_names_cover_neither_error_bars_nor_the_legend():
    names = {(10.0 * 1.5**i, 50.0): f"method {i}" for i in range(10)}
    deviations = dict.fromkeys(names, 20.0)
    figure, axes = plt.subplots(figsize=(11, 6.5), layout="constrained")
    for place, own in deviations.items():
        axes.errorbar(*place, own, fmt="o", label=names[place])
    axes.set(xscale="log", xlim=(1, 5000), ylim=(0, 100))
    legend = axes.legend(loc="upper center", ncols=5)
    labels = label(axes, names, deviations)
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in labels]
    assert not any(box.overlaps(legend.get_window_extent()) for box in boxes)
    for x, y in names:
        bar = Bbox(axes.transData.transform([(x, y - 20), (x, y + 20)]))
        assert not any(bar.padded(1).overlaps(box) for box in boxes)
    plt.close(figure)


@pytest.mark.parametrize("cut_short", [False, True])
def test_no_reason_is_known_only_where_the_warm_up_was_over(cut_short):
    runs = [Run(m, 0, scores=[s]) for m, s in (("none", 98.0), ("fp8", 50.0), ("topk", 97.5))]
    line = behind(runs, cut_short).strip()
    assert line.startswith("fp8: 48.0 points below none; ")
    assert ("no reason is known" in line) is not cut_short
    assert ("the warm-up was cut short" in line) is cut_short


def test_of_perplexities_less_is_better():
    runs = [
        Run(
            m,
            0,
            PERPLEXITY,
            scores=[99.0, 80.0],
            test=p,
            bytes_sent=[8, 12],
            dense_bytes=40,
            steps=2,
        )
        for m, p in (("none", 20.0), ("fp8", 25.25), ("topk", 18.0))
    ]
    assert behind(runs).strip() == "fp8: 5.2 points above none; no reason is known"
    row = table(runs).splitlines()[3]
    assert row.split() == ["fp8", "25.25", "6", "B", "3.3x", "4", "B", "5.0x", "0.0", "ms"]


def test_seconds_to_the_accuracy_of_dense_training(tmp_path):
    def run(method: str, seed: int, scores: list[float], elapsed: list[float]) -> Run:
        costs = {"bytes_sent": [2**20, 2**21, 2**22], "losses": [1.0], "steps": 3}
        return Run(method, seed, scores=scores, elapsed=elapsed, **costs)

    times = [1.0, 2.0, 3.0]
    runs = [run("none", seed, [90.0, 97.0 + seed, 97.5], times) for seed in (0, 1)]
    runs += [run("fp16", 0, [96.0, 96.5, 97.5], [0.5, 1.0, 1.5])]
    runs += [run("dgc", 0, [80.0, 90.0, 96.0], times)]
    assert reached(runs) == "96.50 % after: none 2.0 s, fp16 1.0 s, dgc not reached"
    assert reached(runs[2:]) == "", "there is nothing to compare with"
    picture(runs, tmp_path / "runs.png")
    assert (tmp_path / "runs.png").stat().st_size > 1000
