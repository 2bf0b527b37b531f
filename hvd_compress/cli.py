"""The command ``hvd-compress``.  It loads no framework by itself."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
from collections.abc import Sequence

from hvd_compress import __version__, config, methods
from hvd_compress.doctor import doctor
from hvd_compress.errors import CompressionError
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

    command = commands.add_parser("methods", help="compression methods and their options")
    command.set_defaults(run=list_methods)
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def list_methods() -> None:
    """Print name, class, first line of the docstring and options of every method."""
    classes = [config.lookup("method", name) for name in config.names("method")]
    width = max(len(cls.name) for cls in classes) + 2
    class_width = max(len(cls.__name__) for cls in classes) + 2
    for cls in classes:
        summary = (inspect.getdoc(cls) or "").partition("\n")[0]
        print(f"{cls.name:<{width}}{cls.__name__:<{class_width}}{summary}".rstrip())
        options = ", ".join(map(_option, dataclasses.fields(cls)))
        if options:
            print(f"{'':<{width + class_width}}{options}")


def _option(field: dataclasses.Field[object]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"{field.name}={field.default!r}"
    if field.default_factory is not dataclasses.MISSING:
        return f"{field.name}={field.default_factory()!r}"
    return field.name


assert methods  # importing it registers them
