"""Time of whole steps: others' ways to average gradients, and this package's, in one run.

    python benchmarks/steps.py                        # ResNet-50, 4 ranks on this machine
    python benchmarks/steps.py --model mobilenet_v2 --backward 0 100 --framework torch
    sudo .venv/bin/python benchmarks/steps.py --networks shm 2x1gbit 4x1gbit --json steps.json
    horovodrun -np 4 -H a:1,b:1,c:1,d:1 python benchmarks/steps.py
    python benchmarks/steps.py --load steps.json --networks 4x1gbit --picture four-hosts.png

A network is shm, this machine's memory, or so many hosts with links of a rate, which tests/cluster
makes of this machine.  Every row gets the same random gradients in the model's shapes, from a
backward that takes one multiplication a tensor, and sleeps so that it takes --backward; the slowest
rank counts.  Rows take turns, in another order each round, so that the machine's load and caches
hit all alike; one that has used up its --budget waits for the others.
With large models, --together limits the rows that are there at a time.

"backward" is in all rows, and "beyond" what a row takes beyond it.  Its floor is the time of
"stream", what every rank has to read and write for momentum and residuals, for methods with a
residual, and that of its bytes at the rate of the line, which is measured first; "times" is the
quotient of the two.  "step" is the optimizer's step that follows, SGD's with momentum 0.9.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from steps_report import (
    Row,
    accuracy_on_mnist,
    drawn,
    drawn_with_accuracy,
    in_page,
    kept,
    lines,
    read,
)
from tqdm import tqdm

from hvd_compress.advisor.shapes import MODELS
from hvd_compress.cli.options import parser_of, picture_file
from hvd_compress.errors import ConfigError
from hvd_compress.launch import is_first, under_horovodrun

CLUSTER = Path(__file__).resolve().parents[1] / "tests" / "cluster"

parser = parser_of(__doc__)
add = parser.add_argument
add("--framework", choices=["torch", "tensorflow"], default="torch")
add("--model", choices=MODELS, default="resnet50", help="whose shapes")
add("--backward", type=float, nargs="+", metavar="MS", help="milliseconds; 0 if not given")
add("--networks", nargs="+", metavar="NETWORK", help="shm or HOSTSxRATE: 4x1gbit; needs root")
add("--cell", default="here", help=argparse.SUPPRESS)  # the network of this job
add(
    "--methods",
    nargs="+",
    metavar="ROW",
    help='rows, or methods such as topk:density=0.01; "DDP fp8": as a hook; "dgc over MPI"; '
    '"dgc, sparse step"; "DDP dgc, nodes": ranks of a host share one exchange; "DDP dgc, views": '
    "gradients are views of the buckets",
)
add("--dgc", type=Path, metavar="PATH", help='a checkout of DGC\'s authors, for "original DGC"')
add("--rounds", type=int, default=15, help="samples of each row")
add("--warmup", type=int, default=6, help="rounds that are not counted: thresholds get known")
add("--budget", type=float, default=60.0, metavar="SECONDS", help="of a row, for each --backward")
add("--together", type=int, default=99, metavar="N", help="rows that fit into memory")
add("--ranks", type=int, default=4, help="when started without horovodrun")
add("--controller", choices=["gloo", "mpi"], default="mpi")
add("--json", type=Path, metavar="FILE", help="write what was measured; other cells stay")
add("--load", type=Path, metavar="FILE", help="measure nothing: show what --json has written")
add("--pages", type=Path, nargs="+", default=[], help="with --load: write tables into these pages")
add("--picture", type=picture_file, metavar="FILE", help="draw the medians")
add(
    "--bars",
    type=picture_file,
    metavar="FILE",
    help="with --load, of one network and backward: draw five rows, accuracy beside each",
)


def main() -> None:
    options = parser.parse_args()
    if options.load:
        rows = [
            row
            for row in read(options.load)
            if row.network in (options.networks or [row.network])
            and row.backward in (options.backward or [row.backward])
        ]
        print("\n".join(lines(rows)))
        for page in options.pages:
            page.write_text(in_page(page.read_text(), rows))
        if options.bars:
            drawn_with_accuracy(rows, accuracy_on_mnist(), options.bars)
        if options.picture:
            drawn(rows, options.picture)
    elif options.networks and options.cell == "here":
        over_networks(options)
    else:
        under_horovodrun(options.ranks, options.controller)
        measure(options)


def over_networks(options: argparse.Namespace) -> None:
    """Run this program on each network, and show all together."""
    with tempfile.TemporaryDirectory() as folder:
        file = options.json or Path(folder, "steps.json")
        for network in options.networks:
            own = ["--cell", network, "--json", str(file)]
            command = [sys.executable, __file__, *sys.argv[1:], *own]
            hosts, _, rate = network.partition("x")
            if network != "shm":
                cluster = [sys.executable, str(CLUSTER), "--hosts", hosts, "--rate", rate]
                command = [*cluster, "--", *command]
            print(f"\n{network}", flush=True)
            subprocess.run(command, check=True)
        rows = [row for row in read(file) if row.network in options.networks]
    print("\n".join(["", *lines(rows)]))
    if options.picture:
        drawn(rows, options.picture)


def measure(options: argparse.Namespace) -> None:
    """Measure all rows as one of the ranks."""
    backend = importlib.import_module(f"contender_{options.framework}")
    is_torch = options.framework == "torch"
    if not is_torch and options.backward:
        parser.error("--backward is PyTorch's: a graph has no place to sleep")
    backend.hvd.init()
    backend.seed(backend.hvd.rank())
    names = [*(("backward", "stream") if is_torch else ()), *(options.methods or backend.USUAL)]
    rate = backend.line_rate() if is_torch else None
    rows: list[Row] = []
    for at in range(0, len(names), options.together):
        found = rows_of(names[at : at + options.together], options, backend)
        rows += [dataclasses.replace(row, rate=rate) for row in found]
        del found
        gc.collect()
    if is_first():
        print("\n".join(["", *lines(rows)]), flush=True)
        if options.json:
            kept(rows, options.json)
        if options.picture and options.cell == "here":
            drawn(rows, options.picture)


def rows_of(names: Sequence[str], options: argparse.Namespace, backend: Any) -> list[Row]:
    """Rows that are in memory at the same time."""
    shapes = MODELS[options.model]()
    weights, contenders = backend.zeros(shapes), []
    for name in names:
        try:
            contenders.append(backend.contender(name, weights, options.dgc))
        except backend.AbsentError as why:
            if is_first():
                print(f"no {name}: {why}", flush=True)
        except (ConfigError, KeyError) as error:
            usual = ", ".join(backend.USUAL)
            raise SystemExit(f"--methods {name}: rows are {usual}; {error}") from None
    dense, rows = 4.0 * sum(map(math.prod, shapes.values())), []
    for milliseconds in options.backward or [0.0]:
        cell = options.cell, options.framework, options.model, milliseconds
        found = samples(contenders, options, backend, milliseconds / 1000)
        for contender in contenders:
            sent = received = contender.sent
            if contender.compression is not None:
                total = contender.compression.stats().total
                sent = total.bytes_sent / total.steps
                received = total.bytes_received / total.steps
            seconds, steps = map(list, zip(*found[contender.name], strict=True))
            of_row = contender.name, seconds, statistics.median(steps), sent, received
            rows.append(Row(*cell, *of_row, dense, None, backend.hvd.size()))
    return rows


def samples(
    contenders: Sequence[Any], options: argparse.Namespace, backend: Any, backward: float
) -> dict[str, list[tuple[float, float]]]:
    """Seconds of averages and of steps, by name."""
    found: dict[str, list[tuple[float, float]]] = {c.name: [] for c in contenders}
    spent = dict.fromkeys(found, 0.0)
    progress = tqdm(range(options.warmup + options.rounds), ncols=90, disable=not is_first())
    for number in progress:
        gradients = backend.random_gradients(MODELS[options.model]())
        turn = number % max(len(contenders), 1)
        for contender in [*contenders[turn:], *contenders[:turn]]:
            own = found[contender.name]
            # All ranks have the seconds of the slowest, so they agree; one sample there must be.
            late = spent[contender.name] > options.budget
            if late and own:
                continue
            counts = number >= options.warmup or late
            if counts and not own and contender.compression is not None:
                contender.compression.reset_stats()
            seconds = contender.sample(gradients, backward)
            spent[contender.name] += sum(seconds)
            if counts:
                own.append(seconds)
    return found


if __name__ == "__main__":
    main()
