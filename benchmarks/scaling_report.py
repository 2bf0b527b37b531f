"""Tables and the picture of ``scaling.py``."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from scaling_model import METHODS, SPARSE, StepModel

from hvd_compress.mpi import CostModel

_SIZES = (10**5, 10**6, 10**7, 10**8, 10**9)
_DENSE = ("ring", "halving_doubling", "direct")
_DRAWN = ("float32", "fp16", "fp16 at best", "DGC")


def model_of(constants: dict[str, Any]) -> StepModel:
    """Return the model whose constants are those of a file."""
    cost = dict(constants["cost"])
    cost["points"] = {
        name: tuple((n, seconds) for n, seconds in points)
        for name, points in cost["points"].items()
    }
    return StepModel(**{**constants, "cost": CostModel(**cost)})


def report(
    found: dict[str, Any],
    ranks: Sequence[int],
    path: Path,
    *,
    gbits: float | None = None,
    latency: float | None = None,
) -> None:
    """Print the tables, and draw the picture to ``path``; for another network if one is given."""
    models = {int(p): model_of(constants) for p, constants in found["constants"].items()}
    base = models[found["base"]]
    _constants(base)
    _collectives(found["collectives"])
    _steps(found, models, base.on(None, None))
    elsewhere = gbits is not None or latency is not None
    model = base.on(gbits, latency)
    _predictions(model, found["elements"], sorted({*models, *ranks}), elsewhere)
    _picture(found, model, path, elsewhere)


def _constants(model: StepModel) -> None:
    cost = model.cost
    print(f"\nmeasured on {cost.size} ranks: alpha {1e6 * cost.alpha:.0f} us,", end=" ")
    print(f"{8e-9 / cost.beta:.2f} Gbit/s, adding {1e-9 / cost.gamma:.1f} GB/s,", end=" ")
    print(f"{1e6 * cost.overhead:.0f} us for one more message;")
    print(f"a pass over memory {1e-9 / model.stream:.1f} GB/s,", end=" ")
    print(f"{1e9 * model.cast:.2f} ns to round an element to half precision and back,", end=" ")
    print(f"{1e9 * model.entry:.0f} ns to")
    print(f"add an entry to an array, {1e6 * model.frame:.0f} us a message,", end=" ")
    print(f"and {1e9 * cost.merge:.0f} ns to add one to a sparse vector;")
    print("a step of 2000 elements on one rank", end=" ")
    print(", ".join(f"{name} {1e3 * s:.2f} ms" for name, s in model.python.items()))


def _collectives(rows: Iterable[tuple[str, str, float, float]]) -> None:
    print(f"\n{'algorithm':20} {'of':26} {'measured':>11} {'predicted':>11} {'error':>8}")
    errors = []
    for name, what, seconds, predicted in rows:
        errors.append(abs(predicted / seconds - 1))
        print(f"{name:20} {what:26} {_ms(seconds)} {_ms(predicted)} {predicted / seconds - 1:8.0%}")
    print(f"median error {statistics.median(errors):.0%}, largest {max(errors):.0%}")


def _steps(found: dict[str, Any], models: dict[int, StepModel], base: StepModel) -> None:
    by_base = f"from {found['base']}"
    print("\nwhole steps, and the model: with the constants and times of these ranks, and with the")
    print(f"constants of {found['base']} ranks and no times, as it predicts for all others")
    print(f"{'ranks':>5} {'elements':>13} {'method':8}", end="")
    print(f" {'median':>11} {'min':>11} {'max':>11}", end="")
    print(f" {'model':>11} {'error':>6} {by_base:>11} {'error':>6}")
    errors: tuple[list[float], list[float]] = ([], [])
    for row in found["points"]:
        p, n, method, seconds = (row[key] for key in ("ranks", "elements", "method", "seconds"))
        median = statistics.median(seconds)
        line = f"{p:5} {n:13,} {method:8} {_ms(median)} {_ms(min(seconds))} {_ms(max(seconds))}"
        for model, deviations in zip((models[p], base), errors, strict=True):
            predicted = model.seconds(method, n, p)
            deviations.append(abs(predicted / median - 1))
            line += f" {_ms(predicted)} {predicted / median - 1:6.0%}"
        print(line)
    for p, n in sorted(found["left_out"]):
        print(f"{p:5} {n:13,} not measured: more than --memory")
    own, others = (statistics.median(deviations) for deviations in errors)
    print(f"median error {own:.0%}, and {others:.0%} from {found['base']} ranks")


def _predictions(model: StepModel, n: int, ranks: Sequence[int], elsewhere: bool) -> None:
    cost = model.cost
    where = "that network" if elsewhere else "the same network"
    where += f", {8e-9 / cost.beta:.2f} Gbit/s and {1e6 * cost.alpha:.0f} us a round"
    print(f"\npredicted for {n:,} elements on {where}")
    print(f"{'ranks':26} " + " ".join(f"{p:>11}" for p in ranks))
    for name in METHODS:
        print(f"{name:26} " + " ".join(_ms(model.seconds(name, n, p)) for p in ranks))
    for name in _DENSE:
        row = [cost.seconds(name, 4 * n, size=p) for p in ranks]
        print(f"{'float32 by ' + name:26} " + " ".join(map(_ms, row)))
    print("\nDGC against fp16 at best, how many times as fast")
    print(f"{'elements':26} " + " ".join(f"{f'{p} ranks':>11}" for p in ranks))
    for size in _SIZES:
        row = [
            model.seconds("fp16 at best", size, p) / model.seconds("DGC", size, p) for p in ranks
        ]
        print(f"{size:<26,} " + " ".join(f"{value:10.2f}x" for value in row))
    for name in SPARSE:
        for dense in ("fp16 at best", "float32"):
            p = model.crossing(name, dense, n)
            at = "up to 4096 ranks" if p is None else f"up to {p - 1} ranks" if p > 2 else "never"
            print(f"{name} is faster than {dense}: {at}")


def _picture(found: dict[str, Any], model: StepModel, path: Path, elsewhere: bool) -> None:
    """Times over ranks and over elements: what was measured as points, the model dashed."""
    n, base = found["elements"], found["base"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    ranks = [2**i for i in range(1, 11)]
    sizes = np.geomspace(1e5, 1e9, 60).astype(int)
    for color, method in zip(plt.colormaps["tab10"].colors, _DRAWN, strict=False):
        rows = [] if elsewhere else [r for r in found["points"] if r["method"] == method]
        of_ranks = [[1e3 * model.seconds(method, n, p)] for p in ranks]
        left.plot(ranks, of_ranks, "--", color=color, label=f"{method}, model")
        of_sizes = [1e3 * model.seconds(method, int(size), base) for size in sizes]
        right.plot(sizes, of_sizes, "--", color=color, label=f"{method}, model")
        for axes, key, other, at in (
            (left, "ranks", "elements", n),
            (right, "elements", "ranks", base),
        ):
            here = [row for row in rows if row[other] == at]
            if here:
                milliseconds = [1e3 * statistics.median(row["seconds"]) for row in here]
                places = [row[key] for row in here]
                axes.plot(places, milliseconds, "o-", color=color, label=f"{method}, measured")
    left.set_title(f"{n:,} elements")
    left.set(xscale="log", yscale="log", xlabel="ranks", ylabel="time of a step [ms]")
    left.set_xticks(ranks, ranks)
    left.minorticks_off()
    right.set_title(f"{base} ranks")
    right.set(xscale="log", yscale="log", xlabel="elements", ylabel="time of a step [ms]")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    print(f"\npicture: {path}")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:8.2f} ms"
