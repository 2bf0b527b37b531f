"""Options, runs and tables of the examples that train in several ways, with several seeds."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from hvd_compress.cli.options import parser_of, positive
from hvd_compress.cli.tables import text_table
from hvd_compress.config import build, lookup, names
from hvd_compress.stats import human_bytes
from hvd_compress.systems import TrainingMethod, rounds  # noqa: F401 - whose names are known then

#: what a run ended with and what it cost, by the heads of the table's columns
Run = dict[str, Any]
#: heads of columns, and what a column shows of the values of several seeds
Columns = Mapping[str, Callable[[Sequence[Any]], str]]


def study_parser(
    doc: str | None, *, epochs: int = 4, lr: float | None = None
) -> argparse.ArgumentParser:
    """Return a parser of the options that all have; with a learning rate, of what a rank does."""
    parser = parser_of(doc)
    parser.add_argument("--epochs", type=positive, default=epochs)
    parser.add_argument("--seeds", type=positive, default=3, help="runs of each")
    parser.add_argument("--ranks", type=positive, default=4, help="when started without a launcher")
    if lr is not None:
        parser.add_argument("--lr", type=above_zero, default=lr)
        parser.add_argument("--batch-size", type=positive, default=16, help="per rank")
    return parser


def above_zero(text: str) -> float:
    """Return a number above 0, of a command line."""
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"must be more than 0; got {text}")
    return value


def each_run(
    names: Iterable[str], seeds: int, train: Callable[[str, int], Run], rank: int
) -> dict[str, list[Run]]:
    """Train in each way with every seed, and return the runs by name; rank 0 shows a bar."""
    runs: dict[str, list[Run]] = {name: [] for name in names}
    with tqdm(total=len(runs) * seeds, unit="run", disable=rank != 0, ncols=90) as bar:
        for seed in range(seeds):
            for name, group in runs.items():
                bar.set_postfix_str(f"{name}, seed {seed}")
                group.append(train(name, seed))
                bar.update()
    return runs


def table(runs: Mapping[str, list[Run]], columns: Columns, head: str = "method") -> str:
    """Return a table with a row for each way to train."""
    rows = [
        (name, *(show([run[column] for run in group]) for column, show in columns.items()))
        for name, group in runs.items()
    ]
    return text_table((head, *columns), rows)


def training_method(text: str) -> TrainingMethod | None:
    """Return the way to train between exchanges that a text such as "diloco:sync_every=8" names, or
    ``None`` if it names none.  All that follows "compression=" is of the method that it names."""
    name, _, options = text.partition(":")
    if name not in names("training"):
        return None
    own, _, compression = options.partition("compression=")
    pairs = [option.split("=", 1) for option in own.split(",") if option]
    found = {option: _value(text) for option, text in pairs}
    if compression:
        found["compression"] = compression
    return build(lookup("training", name), found)


def _value(text: str) -> Any:
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        return text


def warmed_up(done: float, warmup: float) -> float:
    """Return the factor of the learning rate when a share of a run is done: up from a tenth until
    the share ``warmup``, then down along a cosine to 0."""
    if done < warmup:
        return 0.1 + 0.9 * done / warmup
    return (1 + math.cos(math.pi * (done - warmup) / max(1 - warmup, 1e-9))) / 2


def rate(done: float) -> float:
    """Return the factor of the learning rate when a share of a run is done: up within a tenth, and
    down along a cosine to a tenth."""
    return min(0.55 + 0.45 * math.cos(math.pi * done), 0.1 + 9 * done)


# -- what columns show --------------------------------------------------------------------------


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return the mean and, of several values, one standard deviation."""
    text = f"{statistics.mean(values):.{digits}f}"
    return f"{text} +- {statistics.stdev(values):.{digits}f}" if len(values) > 1 else text


def percent(values: Sequence[float]) -> str:
    return f"{spread(values)} %"


def size(values: Sequence[float]) -> str:
    return human_bytes(statistics.mean(values))


def times(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.1f}x" if math.isfinite(statistics.mean(values)) else "-"


def milliseconds(seconds: Sequence[float]) -> str:
    return f"{1000 * statistics.median(seconds):.1f} ms"


def first(values: Sequence[Any]) -> str:
    return str(values[0])


#: the 97.5 % points of Student's distribution, for 2 to 10 values
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


def half_width(values: Sequence[float]) -> float:
    """Return that of the mean's 95 % confidence interval; infinite for one value."""
    if len(values) < 2:
        return math.inf
    quantile = STUDENT[min(len(values), 10) - 2]
    return quantile * statistics.stdev(values) / math.sqrt(len(values))
