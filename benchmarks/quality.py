"""The loss that each method costs, by recipe, horizon and seed, at its best learning rate.

    python -m benchmarks.quality
    python -m benchmarks.quality --recipes bytes --methods none topk:density=0.01 --minutes 10
    python -m benchmarks.quality --minutes 0 --advice --page docs/accuracy.md  # of what is known

All ranks train in one process, one after the other (hvd_compress/engines/lockstep.py), which gives
the sums of a real job.  Runs are kept in ``--results`` and not done again.  The most telling ones
come first, so any number of minutes is of use.

A method may be one of compression (``topk:density=0.01``), a part of an optimizer
(``onebit_adam``), or one that trains between exchanges
(``local_sgd:sync_every=4,compression=topk:density=0.04``).
"""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from benchmarks.turns import write_rows
from hvd_compress.advisor.losses import FILE, RECIPES, MeasuredLoss
from hvd_compress.cli.options import parser_of, picture_file, positive
from hvd_compress.stats import human_bytes
from mpi_examples.study import half_width

#: after a method: a quarter of the steps falls to its density, or a tenth goes before low rank
WARM_UP = ", warm-up"
#: AdamW on each rank, and one bit per element of the changes
ONE_BIT_AFTER = "unsent=stays,compression=onebit:column=512,via=allgather"
#: what is tried on each recipe
METHODS = {
    "bytes": (
        *("none", "bf16", "linear", "fp8", "powersgd:rank=4", "topk:density=0.01"),
        *("topk:density=0.1", f"topk:density=0.01{WARM_UP}", "onebit", "onebit_adam"),
        *("diloco:sync_every=10", "diloco:sync_every=10,compression=linear"),
        "sparse_loco:sync_every=15",
        "local_sgd:sync_every=4,compression=topk:density=0.04",
        *(f"local_sgd:sync_every={every},{ONE_BIT_AFTER}" for every in ("1", "2,start=120")),
    ),
    "bytes-muon": ("none", "bf16", "linear", "powersgd:rank=4"),
    "mnist": (
        *("none", "fp16", "linear", "fp8", "powersgd:rank=2", "powersgd:rank=4", "onebit"),
        *("topk:density=0.01", f"topk:density=0.001{WARM_UP}", f"dgc:density=0.01{WARM_UP}"),
        *(f"dgc:density=0.001{WARM_UP}", f"dgc:compact{WARM_UP}"),
    ),
}
RESULTS = Path(__file__).with_suffix(".json")
RANKS = 4
#: what the learning rate of a recipe is multiplied with; the best of them counts
FACTORS = (1.0, 0.5, 2.0, 1.4)


class Training(NamedTuple):
    """One training, and the key that it is kept by."""

    recipe: str  # with the name of a file that was given
    method: str
    horizon: float  # times the steps of the recipe
    factor: float  # times its learning rate
    seed: int

    @property
    def key(self) -> str:
        return f"{self.recipe} {self.horizon:g}x {self.method} lr*{self.factor:g} seed={self.seed}"

    @classmethod
    def of(cls, key: str) -> Training:
        """Return what is kept by a key."""
        found = re.fullmatch(r"(\S+) (\S+)x (.+) lr\*(\S+) seed=(\d+)", key)
        recipe, horizon, method, factor, seed = found.groups()
        return cls(recipe, method, float(horizon), float(factor), int(seed))


class Group(NamedTuple):
    """The runs of one row at its best learning rate: test losses by seed, and what was sent."""

    factor: float
    losses: dict[int, float]
    scores: dict[int, float]
    sent: float  # bytes per step of a rank
    dense: int
    steps: int
    in_points: bool


def in_order(
    recipe: str,
    methods: Sequence[str],
    horizons: Sequence[float],
    factors: Sequence[float],
    seeds: int,
) -> Iterator[Training]:
    """Return the runs of a recipe, the most valuable first: each method once, then its other
    learning rates, then more seeds."""
    for seed, horizon in itertools.product(range(seeds), horizons):
        for factor, method in itertools.product(factors, methods):
            yield Training(recipe, method, horizon, factor, seed)


def groups(
    known: dict[str, Any], wanted: Sequence[Training]
) -> dict[tuple[str, float, str], Group]:
    """Return the rows by recipe, horizon and method, at the best learning rate of each: the one
    with the least mean loss, over the seeds that all of its rates have."""
    found: dict[Any, dict[float, dict[int, Any]]] = defaultdict(lambda: defaultdict(dict))
    for run in wanted:
        if run.key in known:
            cell = run.recipe, run.horizon, run.method
            found[cell][run.factor][run.seed] = known[run.key]
    rows = {}
    for cell, rates in found.items():
        common = set.intersection(*map(set, rates.values()))
        sums = {
            factor: sum(ends[seed]["loss"] for seed in common) for factor, ends in rates.items()
        }
        best = min(sums, key=sums.__getitem__)  # the first, without a common seed
        ends = rates[best]
        rows[cell] = Group(
            best,
            {seed: end["loss"] for seed, end in ends.items()},
            {seed: end["score"] for seed, end in ends.items()},
            statistics.mean(end["sent"] for end in ends.values()),
            next(iter(ends.values()))["dense"],
            next(iter(ends.values()))["steps"],
            cell[0] in RECIPES and RECIPES[cell[0]].unit == "points",
        )
    return rows


def lost(group: Group, dense: Group) -> tuple[list[float], str]:
    """Return what is lost seed by seed, and its unit: per cent of the loss of dense training, or
    points of accuracy."""
    pairs = [seed for seed in group.losses if seed in dense.losses]
    if group.in_points and all(map(math.isfinite, group.losses.values())):
        return [dense.scores[seed] - group.scores[seed] for seed in pairs], "points"
    return [100 * (group.losses[seed] / dense.losses[seed] - 1) for seed in pairs], "%"


def tables(known: dict[str, Any], wanted: Sequence[Training]) -> list[str]:
    """One table per recipe and horizon, in Markdown; the differences are those of equal seeds."""
    rows = groups(known, wanted)
    texts = []
    for recipe, horizon in dict.fromkeys((recipe, horizon) for recipe, horizon, _ in rows):
        dense = rows.get((recipe, horizon, "none"))
        in_points = next(g.in_points for cell, g in rows.items() if cell[0] == recipe)
        lines = [
            f"| {recipe}, {horizon:g}x | {'accuracy' if in_points else 'bits per byte'} | lost "
            "| sent per step | ratio | rate | seeds |",
            f"|{'---|' * 7}",
        ]
        for (*cell, method), group in rows.items():
            if tuple(cell) != (recipe, horizon):
                continue
            score = statistics.mean(group.scores.values())
            cells = (
                f"`{method}`",
                f"{score:.2f} %" if in_points else f"{score:.3f}",
                lost_text(group, dense) if dense and method != "none" else "",
                human_bytes(group.sent),
                f"{group.dense / group.sent:.0f}x",
                f"{group.factor:g}",
                str(len(group.scores)),
            )
            lines.append(f"| {' | '.join(cells)} |")
        texts.append("\n".join(lines))
    return texts


def in_page(page: str, texts: Sequence[str]) -> str:
    """Return a page whose tables with the same heads are these."""
    for text in texts:
        before, head, table = page.partition(text.partition(" | ")[0] + " | ")
        if head:
            page = before + text + "\n\n" + table.partition("\n\n")[2]
    return page


def lost_text(group: Group, dense: Group) -> str:
    """The mean of what is lost, and half of its 95 % confidence interval, if it is known."""
    more, unit = lost(group, dense)
    if not all(map(math.isfinite, more)):
        return "diverges"
    width = half_width(more)
    interval = f" ± {width:.2f}" if math.isfinite(width) else ""
    return f"{statistics.mean(more):+.2f}{interval} {unit}"


def advice(known: dict[str, Any], wanted: Sequence[Training]) -> str:
    """Return what ``hvd-compress advise`` knows of these runs."""
    found = groups(known, wanted)
    lines = []
    for (recipe, horizon, method), group in found.items():
        dense = found.get((recipe, horizon, "none"))
        if dense and recipe in RECIPES and (more := lost(group, dense)[0]):
            mean = statistics.mean(more)
            rounded = round(mean, 2) if math.isfinite(mean) else None
            loss = MeasuredLoss(recipe, group.steps, method, mean, len(more))
            lines.append(" " + json.dumps(loss._asdict() | {"lost": rounded}))
    return "[\n" + ",\n".join(lines) + "\n]\n"


def picture(known: dict[str, Any], wanted: Sequence[Training], file: Path) -> None:
    """Loss above dense training over the bytes that are sent, one panel per recipe and horizon."""
    import matplotlib.pyplot as plt

    from mpi_examples.report import save  # which needs no screen

    rows = groups(known, wanted)
    panels = list(dict.fromkeys(cell[:2] for cell in rows if (cell[0], cell[1], "none") in rows))
    figure, axes = plt.subplots(1, len(panels), figsize=(6 * len(panels), 5), squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        dense = rows[panel[0], panel[1], "none"]
        for (*cell, method), group in rows.items():
            more = lost(group, dense)[0] if tuple(cell) == panel and method != "none" else []
            if not more or not all(map(math.isfinite, more)):
                continue
            x, y = group.dense / group.sent, statistics.mean(more)
            width = half_width(more)
            axis.errorbar(x, y, width if math.isfinite(width) else 0, fmt="o", capsize=3)
            axis.annotate(method, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=7)
        axis.axhline(0, color="grey", linewidth=0.8)
        axis.set(xscale="log", title=f"{panel[0]}, {panel[1]:g}x", xlabel="times fewer bytes")
    axes[0][0].set_ylabel("lost against dense training, per cent of the loss or points")
    figure.tight_layout()
    save(figure, file)


def arguments() -> Any:
    parser = parser_of(__doc__)
    parser.add_argument("--recipes", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--methods", nargs="+", help="instead of those of each recipe")
    parser.add_argument("--horizons", nargs="+", type=float, default=[1, 4])
    parser.add_argument("--factors", nargs="+", type=float, default=FACTORS, help="of the rate")
    parser.add_argument("--seeds", type=positive, default=3)
    parser.add_argument("--minutes", type=float, default=math.inf, help="no run starts later")
    parser.add_argument("--data", type=Path, help="a file to train bytes on")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--picture", type=picture_file)
    parser.add_argument("--page", type=Path, help="whose tables are those of all that is kept")
    parser.add_argument("--advice", action="store_true", help="write what hvd-compress advise says")
    options = parser.parse_args()
    if options.data and not options.data.is_file():
        parser.error(f"--data: there is no file {options.data}")
    return options


def wanted(options: Any) -> list[Training]:
    """Return all runs that the command line asks for, the most valuable first."""
    runs = [
        run
        for recipe in options.recipes
        for run in in_order(
            f"{recipe}({options.data.name})" if options.data and recipe == "bytes" else recipe,
            list(dict.fromkeys(["none", *(options.methods or METHODS[recipe])])),
            options.horizons,
            options.factors,
            options.seeds,
        )
    ]
    return sorted(runs, key=lambda run: (run.seed, run.horizon))  # stable


def main() -> None:
    options = arguments()
    runs = wanted(options)
    known = json.loads(options.results.read_text()) if options.results.exists() else {}
    missing = [run for run in runs if run.key not in known]
    if missing and options.minutes > 0:
        from benchmarks.recipes import train

        until = time.monotonic() + 60 * options.minutes
        options.results.parent.mkdir(parents=True, exist_ok=True)
        for run in tqdm(missing, unit="run", ncols=90):
            if time.monotonic() > until:
                break
            known[run.key] = train(run, options.data)
            write_rows(known, options.results)
    print("\n\n".join(["", *tables(known, runs), "lost: against dense training of the same seed"]))
    every = [Training.of(key) for key in known]
    if options.page:
        options.page.write_text(in_page(options.page.read_text(), tables(known, every)))
    if options.advice:
        FILE.write_text(advice(known, every))
    if options.picture:
        picture(known, runs, options.picture)


if __name__ == "__main__":
    main()
