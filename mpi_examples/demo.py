"""Options, methods and the end of the examples that compare compressions."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from hvd_compress import (
    LGC,
    Compressor,
    ConfigError,
    NeedsTuning,
    as_compressor,
    method_names,
    methods,
    warmup_to,
)
from hvd_compress.cli.options import picture_file
from hvd_compress.config import lookup
from mpi_examples.report import Run, picture, reached, table
from mpi_examples.study import study_parser

TOP_K = (
    methods.DGC,
    methods.EF21,
    LGC,
    methods.OkTopk,
    methods.ScaleCom,
    methods.TopK,
)
#: of ``--compression all``, options where neither defaults nor a density of 1 % are the budget
OPTIONS = {
    "powersgd": "rank=2",
    "randomk": "",
    "lgc": "density=0.01,learn=20,code=100",
}
#: methods that are a part of an optimizer: what this is made with
PARTNERS: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"lr": 1e-3, "freeze_step": 60, "eps": 1e-3},
    "ZeroOneAdam": {"lr": 1e-3, "var_freeze_step": 60, "eps": 1e-3},
}
#: of the learning rate, for methods whose steps do not shrink with the gradient
RATES = {"signsgd": 0.004, "signum": 0.01}
warnings.simplefilter("ignore", NeedsTuning)  # of those rates


def parser_of(doc: str, output: str, *, epochs: int, seeds: int) -> argparse.ArgumentParser:
    parser = study_parser(doc, epochs=epochs, lr=0.05)
    parser.set_defaults(seeds=seeds)
    parser.add_argument(
        "--compression",
        nargs="+",
        default=["none", "dgc"],
        metavar="METHOD",
        help="methods to compare, such as none fp16 topk dgc:values=float16; or all, which has "
        "other defaults: at most 10 epochs, one seed, and 1 %% of the elements where a method "
        "chooses some",
    )
    parser.add_argument(
        "--density", type=float, default=0.001, help="fraction of elements that dgc and topk send"
    )
    parser.add_argument(
        "--warmup-epochs",
        type=int,
        default=4,
        help="epochs in which the density falls and the learning rate rises",
    )
    parser.add_argument("--output", type=picture_file, default=Path(output), help="the picture")
    return parser


def horovod_parser(doc: str, output: str, *, epochs: int, seeds: int) -> argparse.ArgumentParser:
    """For the examples that run on Horovod."""
    parser = parser_of(doc, output, epochs=epochs, seeds=seeds)
    parser.add_argument(
        "--controller",
        choices=["gloo", "mpi"],
        default="mpi",
        help="when started without horovodrun",
    )
    return parser


def parse(parser: argparse.ArgumentParser, partners: bool = False) -> argparse.Namespace:
    """The command line, checked, with ``methods`` by what the user called them; ``partners``: the
    example knows methods that need an optimizer of their own."""
    if parser.parse_args().compression == ["all"]:
        parser.set_defaults(epochs=min(10, parser.get_default("epochs")), seeds=1)
    options = parser.parse_args()
    if options.compression == ["all"]:
        options.compression = everything(partners)
    try:
        options.methods = {
            text: compressor(text, options.density, options.warmup_epochs)
            for text in options.compression
        }
    except ConfigError as error:
        parser.error(f"--compression or --density: {error}")
    return options


def everything(partners: bool) -> list[str]:
    """All methods that can be named, the dense one first; ``partners``: also those that need an
    optimizer of their own.  Those that choose elements send 1 %, all others have their defaults."""
    found = []
    for name in sorted(method_names(), key=lambda name: (name != "none", name)):
        method = lookup("method", name)
        if partners or method.partner is None:
            text = OPTIONS.get(name, "density=0.01" if hasattr(method, "density") else "")
            found.append(f"{name}:{text}" if text else name)
    return found


def compressor(text: str, density: float, warmup_epochs: int) -> Compressor:
    """A method by name; top-k methods get the density of the command line and a warm-up to it."""
    method = as_compressor(text)
    if isinstance(method, TOP_K) and "density=" not in text:
        try:
            return dataclasses.replace(method, density=warmup_to(density, epochs=warmup_epochs))
        except ConfigError:  # LGC is trained for one density
            return dataclasses.replace(method, density=density)
    return method


def rate_of(method: str) -> float:
    """Return what to multiply the learning rate with."""
    return RATES.get(method.partition(":")[0], 1.0)


def compare(
    train: Callable[[str, int, tqdm], Run], options: argparse.Namespace, rank: int, title: str
) -> None:
    """Train with every method and seed; rank 0 shows what came of it.

    Args:
        train: of a method's text, a seed, and the progress bar, which it advances every epoch.
    """
    total = options.epochs * options.seeds * len(options.methods)
    bar = tqdm(total=total, unit="epoch", disable=rank != 0, ncols=90, mininterval=1)
    with logging_redirect_tqdm([logging.getLogger("hvd_compress")]):
        runs = [train(m, seed, bar) for seed in range(options.seeds) for m in options.methods]
    bar.close()
    if rank == 0:
        print(f"\n{title}\n")
        print(table(runs))
        if line := reached(runs):
            print(line)
        if options.epochs <= options.warmup_epochs:
            print("The warm-up was not over: learning rates were rising, densities falling.")
        picture(runs, options.output)
