"""Tables and pictures at the end of the examples."""

from __future__ import annotations

from mpi_examples.report import PERPLEXITY, Run, picture, reached, table


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
            losses=[1.0, 1.0],
        )
        for m, p in (("none", 20.0), ("fp8", 25.25), ("topk", 18.0))
    ]
    row = table(runs).splitlines()[3]
    assert row.split() == ["fp8", "25.25", "6", "B", "3.3x", "4", "B", "5.0x", "0.0", "ms"]


def test_seconds_to_the_accuracy_of_dense_training(tmp_path):
    def run(method: str, seed: int, scores: list[float], elapsed: list[float]) -> Run:
        costs = {"bytes_sent": [2**20, 2**21, 2**22], "losses": [1.0] * 3}
        return Run(method, seed, scores=scores, elapsed=elapsed, **costs)

    times = [1.0, 2.0, 3.0]
    runs = [run("none", seed, [90.0, 97.0 + seed, 97.5], times) for seed in (0, 1)]
    runs += [run("fp16", 0, [96.0, 96.5, 97.5], [0.5, 1.0, 1.5])]
    runs += [run("dgc", 0, [80.0, 90.0, 96.0], times)]
    assert reached(runs) == "96.50 % after: none 2.0 s, fp16 1.0 s, dgc not reached"
    assert reached(runs[2:]) == "", "there is nothing to compare with"
    picture(runs, tmp_path / "runs.png")
    assert (tmp_path / "runs.png").stat().st_size > 1000


def test_many_methods_are_drawn_as_bars(tmp_path):
    costs = {"bytes_sent": [2**20, 2**21], "losses": [1.0] * 3, "scores": [50.0, 90.0]}
    runs = [Run(f"method {i}", seed, **costs) for i in range(12) for seed in (0, 1)]
    picture(runs, tmp_path / "runs.png")
    assert (tmp_path / "runs.png").stat().st_size > 1000
