"""``HVD_COMPRESSION`` for a while, and what this package logs meanwhile."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def logged() -> Iterator[list[str]]:
    handler, logger = _Lines(), logging.getLogger("hvd_compress")
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)


@contextmanager
def environment(text: str | None) -> Iterator[list[str]]:
    if text is not None:
        os.environ["HVD_COMPRESSION"] = text
    try:
        with logged() as lines:
            yield lines
    finally:
        os.environ.pop("HVD_COMPRESSION", None)


def assert_said(lines: list[str], rank: int, *beginnings: str) -> None:
    """Rank 0 says once what the variable does, and once for each what a script says instead."""
    about = [line for line in lines if line.startswith("HVD_COMPRESSION=")]
    wanted = beginnings if rank == 0 else ()
    assert len(about) == len(wanted), about
    for line, beginning in zip(about, wanted, strict=True):
        assert line.startswith(beginning), line
