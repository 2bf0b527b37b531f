"""What the training examples have in common: options, methods to compare, the table at the end."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from hvd_compress import LGC, Compressor, ConfigError, as_compressor, methods, warmup_to
from hvd_compress.cli.options import picture_file
from mpi_examples.budget import everything
from mpi_examples.data import cifar10_folder
from mpi_examples.report import Run, behind, picture, reached, save_runs, table
from mpi_examples.study import check_counts

TOP_K = (
    methods.DGC,
    methods.EF21,
    LGC,
    methods.OkTopk,
    methods.ScaleCom,
    methods.TopK,
)


def parser_of(doc: str, output: str, *, epochs: int, seeds: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=doc.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
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
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--seeds", type=int, default=seeds, help="runs per method")
    parser.add_argument("--batch-size", type=int, default=16, help="per rank")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--ranks", type=int, default=4, help="when started without a launcher")
    parser.add_argument("--output", type=picture_file, default=Path(output), help="the picture")
    parser.add_argument("--results", type=Path, help="where to write each run's end as JSON")
    return parser


def horovod_parser(
    doc: str, output: str, models: list[str], *, epochs: int, seeds: int
) -> argparse.ArgumentParser:
    """For the examples that run on Horovod; the first model is the default."""
    parser = parser_of(doc, output, epochs=epochs, seeds=seeds)
    parser.add_argument("--model", choices=models, default=models[0])
    parser.add_argument(
        "--controller",
        choices=["gloo", "mpi"],
        default="mpi",
        help="when started without horovodrun",
    )
    return parser


def digits_parser(doc: str, models: list[str]) -> argparse.ArgumentParser:
    parser = horovod_parser(doc, "results/digits.png", models, epochs=30, seeds=3)
    parser.add_argument("--data-dir", type=cifar10_folder, help="CIFAR-10 in its usual files")
    return parser


def parse(parser: argparse.ArgumentParser, partners: bool = False) -> argparse.Namespace:
    """The command line, checked, with ``methods`` by what the user called them; ``partners``: the
    example knows methods that need an optimizer of their own."""
    if parser.parse_args().compression == ["all"]:
        parser.set_defaults(epochs=min(10, parser.get_default("epochs")), seeds=1)
    options = parser.parse_args()
    check_counts(parser, options, "epochs", "seeds", "batch_size", "ranks")
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


def compressor(text: str, density: float, warmup_epochs: int) -> Compressor:
    """A method by name; top-k methods get the density of the command line and a warm-up to it."""
    method = as_compressor(text)
    if isinstance(method, TOP_K) and "density=" not in text:
        try:
            return dataclasses.replace(method, density=warmup_to(density, epochs=warmup_epochs))
        except ConfigError:  # LGC is trained for one density
            return dataclasses.replace(method, density=density)
    return method


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
        cut_short = options.epochs <= options.warmup_epochs
        if cut_short:
            print("The warm-up was not over: learning rates were rising, densities falling.")
        print(behind(runs, cut_short))
        picture(runs, options.output)
        if options.results:
            save_runs(runs, options.results)
        print(f"\npicture: {options.output.resolve()}")
