"""The command ``hvd-compress``.  It loads no framework by itself."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import signal
import sys
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any

from hvd_compress import __version__
from hvd_compress.advisor import MODELS, OPTIMIZERS
from hvd_compress.advisor.costs import RANKS, SHAPE, costs_of_defaults
from hvd_compress.base import Compressor
from hvd_compress.cli.advise import advise, bandwidth, duration
from hvd_compress.cli.doctor import WANTED, doctor
from hvd_compress.cli.options import picture_file, positive
from hvd_compress.cli.stragglers import stragglers
from hvd_compress.errors import CompressionError, ConfigError, NeedsTuning
from hvd_compress.methods.texts import method_names, named
from hvd_compress.studies.stragglers import DISTRIBUTIONS

#: argparse's, too
WRONG_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status: ``WRONG_USAGE`` for what is wrong with the
    command, 1 for what is wrong with anything else."""
    arguments = vars(_parser().parse_args(argv))
    run = arguments.pop("run")
    try:
        status = run(**arguments) or 0
        sys.stdout.flush()
    except CompressionError as error:
        print(f"hvd-compress: error: {error}", file=sys.stderr)
        return WRONG_USAGE if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Who reads has seen enough, as with `| head`.  Python flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hvd-compress", description="Gradient compression for Horovod and MPI."
    )
    parser.add_argument("--version", action="version", version=f"hvd_compress {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("doctor", help="what is installed, what is wrong, what helps")
    command.add_argument(
        "--for",
        nargs="+",
        choices=WANTED,
        default=(),
        dest="wanted",
        metavar="WHAT",
        help=f"what has to work, of {', '.join(WANTED)} (default: what is installed)",
    )
    command.add_argument("--json", action="store_true", dest="as_json", help=JSON)
    command.set_defaults(run=doctor)

    command = commands.add_parser("methods", help="compression methods, their costs and options")
    command.add_argument("names", nargs="*", metavar="NAME", help="all about these")
    command.add_argument("--json", action="store_true", dest="as_json", help=JSON)
    command.set_defaults(run=list_methods)

    command = commands.add_parser(
        "stragglers",
        help="what waiting for slow workers costs",
        description="What waiting for slow workers costs, by formulas and by simulation: "
        "synchronous, with backup workers, with local steps, and asynchronous.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = command.add_argument
    add("--workers", type=positive, nargs="+", default=[4, 8, 32], metavar="N", help="in all")
    add("--backup", type=int, default=1, metavar="B", help="workers that are not waited for")
    add("--local-steps", type=positive, default=8, metavar="H", help="between meetings")
    add("--distribution", choices=DISTRIBUTIONS, default="exponential", help="of a step's time")
    add("--spread", type=float, default=1.0, help="deviation of a step's time, whose mean is 1")
    add("--steps", type=positive, default=4000, help="to simulate")
    add("--seed", type=int, default=0, help="of random numbers")
    add(
        "--picture",
        type=picture_file,
        metavar="FILE",
        help="draw gradients used by number of workers",
    )
    add("--json", action="store_true", dest="as_json", help=JSON)
    command.set_defaults(run=stragglers)

    command = commands.add_parser(
        "advise",
        help="what a step takes with each method on a network, and which to choose",
        description="The time of a step with each method: messages by the formulas of good "
        "collectives, and the method's own work as measured on one core; and what it lost in the "
        "nearest training that was measured.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = command.add_argument
    add(
        "--model",
        default="resnet50",
        help=f"{', '.join(MODELS)}, or module:function, which returns a torch.nn.Module or shapes "
        "by name, and is measured on this machine",
    )
    add("--ranks", type=positive, default=16, metavar="P", help="in all")
    add("--hosts", type=positive, metavar="H", help="among which they are divided (default: P)")
    add("--bandwidth", type=bandwidth, default="1gbit", help="of each host's line")
    add("--latency", type=duration, default="50us", help="of a small message, half a ping")
    add("--backward", type=duration, default="100ms", help="time to compute the gradients")
    add(
        "--optimizer",
        choices=OPTIMIZERS,
        default="adamw",
        help="what is trained with; what methods lose depends on it",
    )
    add("--steps", type=positive, default=10_000, metavar="N", help="of the training")
    add(
        "--tolerance",
        type=float,
        default=argparse.SUPPRESS,
        metavar="X",
        help="the most that the method to write may have lost in the nearest training that was "
        "measured: per cent of the test loss, with SGD points of accuracy (default: 0.5 %%, 0.2 "
        "points)",
    )
    add(
        "--measure",
        action="store_true",
        help="measure network and methods where this runs, under mpirun: a minute",
    )
    add("--json", action="store_true", dest="as_json", help=JSON)
    command.set_defaults(run=advise)
    return parser


#: the help of ``--json``
JSON = "print JSON, for scripts"

COLUMNS = ("name", "class", "bits sent", "received", "collectives", "state", "reference")


def list_methods(names: Sequence[str], as_json: bool) -> None:
    """Print a table of all methods with what they cost, or what is to be known of some."""
    warnings.simplefilter("ignore", NeedsTuning)  # nothing is trained here
    classes = [named(name) for name in names or method_names()]
    if as_json:
        print(
            json.dumps(
                [_facts(cls) for cls in classes], indent=2, default=lambda thing: thing.to_config()
            )
        )
        return
    if names:
        for cls in classes:
            _describe(cls)
        return
    rows = [COLUMNS, *((cls.name, cls.__name__, *_costs(cls), cls.reference) for cls in classes)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())
    print(
        f"\nBits an element, counted in float32 on a matrix of {SHAPE[0]} x {SHAPE[1]} between "
        f"{RANKS} ranks.\nWhere all is gathered, what is received grows with the number of ranks; "
        "sums, all-to-all\nand the gather behind it do not. State in units of the gradient. "
        "Options: hvd-compress methods NAME ..."
    )


def _costs(cls: type[Compressor]) -> tuple[str, str, str, str]:
    found = costs_of_defaults(cls.name)
    state = ", ".join(f"{key} {size:g}" for key, size in found.memory.items()) or "-"
    return f"{found.sent:g}", f"{found.received:g}", ", ".join(found.collectives), state


def _facts(cls: type[Compressor]) -> dict[str, Any]:
    """All that the table and the descriptions say, in one form for scripts."""
    facts: dict[str, Any] = {"name": cls.name, "class": cls.__name__, "reference": cls.reference}
    if cls.name in method_names():
        costs = costs_of_defaults(cls.name)
        facts["bits_sent"], facts["bits_received"] = costs.sent, costs.received
        facts["collectives"], facts["state"] = costs.collectives, costs.memory
    return facts | {"options": _defaults(cls), "text": inspect.getdoc(cls)}


def _describe(cls: type[Compressor]) -> None:
    print(f"{cls.name}: {cls.__name__}\n")
    print(textwrap.indent(inspect.getdoc(cls) or "", "    "))
    print("\n    Defaults:")
    defaults = _defaults(cls)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        own = f"={defaults[field.name]!r}" if field.name in defaults else ""
        print(f"        {field.name}{own}")
    if cls.name not in method_names():
        return
    sent, received, collectives, state = _costs(cls)
    print(f"\n    Bits an element: {sent} sent, {received} received between {RANKS} ranks")
    print(f"    Collectives: {collectives}; state, in gradients: {state}\n")


def _defaults(cls: type[Compressor]) -> dict[str, Any]:
    found = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
    return found
