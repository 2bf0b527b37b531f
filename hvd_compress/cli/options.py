"""Values of command-line options that several programs have; bad ones are errors of usage."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from hvd_compress.launch import is_first

#: of files that can be drawn to
ENDINGS = (".png", ".svg", ".pdf", ".jpg")


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help begins with the first line of a program's docstring."""
    return argparse.ArgumentParser(
        description=(doc or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )


def picture_file(text: str) -> Path:
    """Return the path of a picture that is to be drawn, perhaps hours later: ``type=picture_file``.

    A default that is a path is taken as it is, and its folder made.
    """
    path = Path(text)
    if path.suffix.lower() not in ENDINGS:
        raise argparse.ArgumentTypeError(f"{text!r} must end in one of {', '.join(ENDINGS)}")
    if not is_first():  # on another host, perhaps
        return path
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}: make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK) or path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} cannot be written: name another file")
    return path


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 1; got {text!r}")
    return int(text)
