"""benchmarks/quality.py: rows by hand, and short runs by real ranks."""

import json
import math

import pytest

from benchmarks import quality
from benchmarks.quality import Training
from hvd_compress.stats import human_bytes
from mpi_examples.study import half_width
from tests import jobs

METHODS = ("none", "topk:density=0.1")


def end(loss):
    return {"loss": loss, "score": 10 * loss, "sent": 100, "dense": 400}


def test_the_best_learning_rate_counts_and_losses_are_compared_by_seed():
    wanted = list(quality.in_order("bytes", METHODS, [1], (1.0, 2.0), 2))
    known = {}
    for run in wanted:
        of_none = 1.0 + 2.0 * run.seed + 0.5 * (run.factor == 2)
        of_top_k = 1.25 + 3.0 * run.seed + 0.5 * (run.factor == 1)
        known[run.key] = end(of_none if run.method == "none" else of_top_k)
    # A rate that has not run with both seeds is compared by what both have.
    del known[Training("bytes", "none", 1, 2.0, 1).key]
    rows = quality.groups(known, wanted)
    dense, top_k = (rows["bytes", 1, method] for method in METHODS)
    assert (dense.factor, dense.losses) == (1.0, {0: 1.0, 1: 3.0})
    assert (top_k.factor, top_k.losses) == (2.0, {0: 1.25, 1: 4.25})
    assert quality.lost(top_k, dense) == [0.25, 1.25]
    line = quality.tables(known, wanted).splitlines()[-1].split()
    # 12.71 * stdev(0.25, 1.25) / sqrt(2) = 6.355
    expected = [METHODS[1], "2.7500", "+0.7500", "±", "6.3550", "27.50", "100", "B", "4x", "2", "2"]
    assert line == expected


def test_rows_of_the_page_are_those_of_the_runs():
    known = json.loads(quality.RESULTS.read_text())
    wanted = quality.in_order("bytes", quality.METHODS["bytes"], [1], [1.0, 0.5], 1)
    rows = quality.groups(known, list(wanted))
    assert [method for _, _, method in rows] == [*quality.METHODS["bytes"]]
    page = (jobs.ROOT / "docs/accuracy.md").read_text()
    for (_, _, method), row in rows.items():
        ratio = f"{row.dense / row.sent:.0f}x"
        cells = f"`{method}`", f"{row.scores[0]:.2f}", f"{row.factor:g}"
        assert f"| {' | '.join(cells)} | {human_bytes(row.sent)} | {ratio} |" in page
    diverged = Training("bytes", "onebit_adam", 1, 1.0, 0)
    assert f"({known[diverged.key]['score']:.2f} bits)" in page


def test_half_a_confidence_interval():
    assert half_width([10, 11, 12]) == pytest.approx(4.30 / math.sqrt(3))
    assert half_width([1]) == math.inf


def test_each_method_runs_once_before_other_rates_and_seeds():
    runs = list(quality.in_order("bytes", METHODS, [1, 4], (1.0, 2.0), 2))
    assert [run.method for run in runs[:2]] == [*METHODS]
    assert {(run.horizon, run.factor, run.seed) for run in runs[:2]} == {(1, 1.0, 0)}
    assert [run.seed for run in runs] == 8 * [0] + 8 * [1]


@pytest.mark.timeout(300)
def test_what_ran_is_kept(tmp_path):
    results, picture = tmp_path / "found.json", tmp_path / "quality.png"
    command = [jobs.python(), "-m", "benchmarks.quality", "--horizons", "0.002", "--seeds", "1"]
    command += ["--factors", "1", "--results", str(results), "--methods", METHODS[1]]
    command += ["onebit_adam", "local_sgd:sync_every=2,compression=topk:density=0.1"]
    _, output = jobs.run(command, timeout=280)
    found = json.loads(results.read_text())
    assert [run["steps"] for run in found.values()] == [2, 2, 2, 2]
    dense = found["bytes 0.002x none lr*1 seed=0"]
    assert dense["sent"] == pytest.approx(dense["dense"], rel=0.01)
    assert all(run["sent"] < 0.7 * run["dense"] for run in list(found.values())[1:])
    again = [*command, "--minutes", "0", "--picture", str(picture)]
    _, said = jobs.run(again, timeout=60)
    table = output[output.index("bytes, 0.002x") :]
    assert table.strip() in said, "kept, not trained again"
    assert picture.read_bytes().startswith(b"\x89PNG")
