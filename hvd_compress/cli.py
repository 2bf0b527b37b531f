"""The command ``hvd-compress``.  It loads no framework by itself."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
import textwrap
import warnings
from collections.abc import Sequence

from hvd_compress import __version__, config, methods
from hvd_compress.base import Compressor
from hvd_compress.doctor import doctor
from hvd_compress.errors import CompressionError, NeedsTuning
from hvd_compress.facts import RANKS, SHAPE, facts
from hvd_compress.horovod_build import install_horovod
from hvd_compress.horovod_plan import GPU, VERSION


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status."""
    arguments = vars(_parser().parse_args(argv))
    run = arguments.pop("run")
    try:
        return run(**arguments) or 0
    except CompressionError as error:
        print(f"hvd-compress: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hvd-compress", description="Gradient compression for Horovod and MPI."
    )
    parser.add_argument("--version", action="version", version=f"hvd_compress {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser(
        "install-horovod",
        help=f"build Horovod {VERSION} for the frameworks of this environment and install it",
        description=f"Build Horovod {VERSION}, which pip cannot, for the installed PyTorch and "
        "TensorFlow, and install it.  Wheels are cached: a second time takes seconds.",
    )
    command.add_argument(
        "--gpu", choices=GPU, default="none", help="what moves GPU tensors (default: none)"
    )
    command.add_argument("--jobs", type=_positive, metavar="N", help="default: number of cores")
    command.add_argument("--rebuild", action="store_true", help="even if there is a cached wheel")
    command.add_argument("--dry-run", action="store_true", help="say what would be done, and stop")
    command.set_defaults(run=install_horovod)

    command = commands.add_parser("doctor", help="what is installed, what is wrong, what helps")
    command.set_defaults(run=doctor)

    command = commands.add_parser("methods", help="compression methods, their costs and options")
    command.add_argument("names", nargs="*", metavar="NAME", help="all about these")
    command.set_defaults(run=list_methods)
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def list_methods(names: Sequence[str]) -> None:
    """Print a table of all methods with what they cost, or what is to be known of some."""
    warnings.simplefilter("ignore", NeedsTuning)  # nothing is trained here
    classes = [config.lookup("method", name) for name in names or methods.method_names()]
    if names:
        for cls in classes:
            _describe(cls)
        return
    rows = [("name", "class", "bits sent", "received", "meets by", "state", "reference")]
    rows += [(cls.name, cls.__name__, *_costs(cls), cls.reference) for cls in classes]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        print("  ".join(cell.ljust(width) for cell, width in cells).rstrip())
    print(
        f"\nBits an element, counted in float32 on a matrix of {SHAPE[0]} x {SHAPE[1]} between "
        f"{RANKS} ranks. Where all\nis gathered, what is received grows with the number of ranks; "
        "sums, all-to-all and the gather behind it\ndo not. State in units of the gradient. "
        "Options: hvd-compress methods NAME ..."
    )


def _costs(cls: type[Compressor]) -> tuple[str, str, str, str]:
    found = facts(cls())
    state = ", ".join(f"{key} {size:g}" for key, size in found.memory.items()) or "-"
    return f"{found.sent:g}", f"{found.received:g}", ", ".join(found.meets), state


def _describe(cls: type[Compressor]) -> None:
    print(f"{cls.name}: {cls.__name__}\n")
    print(textwrap.indent(inspect.getdoc(cls) or "", "    "))
    print("\n    Defaults:")
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        print(f"        {_option(field)}")
    if cls.name not in methods.method_names():
        return
    sent, received, meets, state = _costs(cls)
    print(f"\n    Bits an element: {sent} sent, {received} received between {RANKS} ranks")
    print(f"    Meets by: {meets}; state, in gradients: {state}\n")


def _option(field: dataclasses.Field[object]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"{field.name}={field.default!r}"
    if field.default_factory is not dataclasses.MISSING:
        return f"{field.name}={field.default_factory()!r}"
    return field.name
