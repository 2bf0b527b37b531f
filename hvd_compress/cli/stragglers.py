"""The command ``hvd-compress stragglers``: a table and a picture of what waiting costs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from hvd_compress.cli.tables import text_table
from hvd_compress.errors import ConfigError, SetupError
from hvd_compress.studies.stragglers import Delays, Row, rows_of


def stragglers(
    workers: Sequence[int],
    backup: int,
    local_steps: int,
    *,
    distribution: str,
    spread: float,
    steps: int,
    seed: int,
    picture: Path | None,
    as_json: bool = False,
) -> None:
    """Print a table of what waiting costs."""
    delays = Delays(distribution, spread)
    if backup >= min(workers):
        raise ConfigError(f"--backup {backup} must be less than --workers: somebody has to work")
    found: dict[int, list[Row]] = {}
    for number, n in enumerate(workers):

        def show(done: float, number: int = number) -> None:
            if sys.stderr.isatty():
                percent = 100 * (number + done) / len(workers)
                print(f"\rsimulated {percent:3.0f} %", end="", file=sys.stderr, flush=True)

        found[n] = rows_of(
            delays,
            n,
            backup=backup,
            local_steps=local_steps,
            steps=steps,
            seed=seed,
            progress=show,
        )
    if sys.stderr.isatty():
        print("\r" + " " * 20 + "\r", end="", file=sys.stderr)
    if as_json:
        rows = [{"workers": n, **row.facts()} for n, rows in found.items() for row in rows]
        print(json.dumps(rows, indent=2))
    else:
        _print_table(found, delays, steps)
    if picture is not None:
        _draw(found, delays, picture)
        print(f"picture: {picture.resolve()}", file=sys.stderr if as_json else sys.stdout)


def _print_table(found: dict[int, list[Row]], delays: Delays, steps: int) -> None:
    distribution, spread = delays.distribution, delays.spread
    print(f"times of a step: {distribution}, mean 1, deviation {spread:g}; {steps} steps simulated")
    header = "strategy", "workers", "time of a step", "simulated", "gradients used", "idle"
    table = [
        (
            row.strategy,
            str(n),
            "-" if math.isnan(row.expected) else f"{row.expected:.4f}",
            f"{row.simulated:.4f}",
            f"{row.used:.2f}",
            f"{row.idle:.1%}",
            f"{row.staleness:.2f}",
        )
        for n, rows in found.items()
        for row in rows
    ]
    print(f"\n{text_table((*header, 'staleness'), table)}")
    print(
        "\nTime of a step: between updates. Gradients used: by all workers, in the mean time of a "
        "step.\nIdle: waited, or computed for nothing. Staleness: updates since a gradient's "
        "parameters."
    )


def _draw(found: dict[int, list[Row]], delays: Delays, picture: Path) -> None:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise SetupError(f"--picture needs matplotlib ({error}): pip install matplotlib") from None
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    counts = list(found)
    for index, row in enumerate(found[counts[0]]):
        used = [rows[index].used for rows in found.values()]
        axes.plot(counts, used, "o-", label=row.strategy)
    axes.plot(counts, counts, "--", color="gray", label="nobody waits")
    axes.set(
        xscale="log", yscale="log", xlabel="workers", ylabel="gradients used in the time of a step"
    )
    axes.set_xticks(counts, list(map(str, counts)))
    axes.xaxis.set_minor_locator(plt.NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_title(f"{delays.distribution} times of a step, deviation {delays.spread:g}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)
    plt.close(figure)
