"""The engine of a single rank."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from hvd_compress.agreement import Terms
from hvd_compress.base import Array
from hvd_compress.engines import lockstep


class LocalEngine:
    """Answers every request with the reply that a single rank would get."""

    rank, size = 0, 1
    is_collective = False
    sums_in_rank_order = True
    reads_device = True

    def __init__(self) -> None:
        self._results: dict[str, Any] = {}

    def start(self, name: str, exchange: Generator[Any, Any, Any]) -> None:
        self._results[name] = lockstep.run([exchange])[0]

    def poll(self) -> None:
        pass

    def finish(self) -> dict[str, Any]:
        results, self._results = self._results, {}
        return results

    def abandon(self) -> None:
        self._results.clear()

    def agree(self, terms: Terms, like: Array, at_once: bool = False) -> None:
        pass

    def check_step(self, describe: Callable[[], list[str]], planned: bool, like: Array) -> None:
        pass
