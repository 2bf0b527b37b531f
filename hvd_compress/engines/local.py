"""The engine of a single rank."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from hvd_compress.engines import lockstep
from hvd_compress.engines.base import Engine


class LocalEngine(Engine):
    """Answers every request with the reply that a single rank would get."""

    rank, size = 0, 1
    reads_device = True

    def __init__(self) -> None:
        self._results: dict[str, Any] = {}

    def start(self, name: str, exchange: Generator[Any, Any, Any]) -> None:
        self._results[name] = lockstep.run([exchange])[0]

    def finish(self) -> dict[str, Any]:
        results, self._results = self._results, {}
        return results

    def abandon(self) -> None:
        self._results.clear()
