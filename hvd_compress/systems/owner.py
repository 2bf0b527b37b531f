"""The owner of a system on one rank: what all systems that meet over an engine do alike."""

from __future__ import annotations

import abc
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.agreement import BETWEEN, Terms
from hvd_compress.backends import backend_of
from hvd_compress.base import Array
from hvd_compress.engines.base import Engine
from hvd_compress.engines.joining import counted
from hvd_compress.reduce.state_file import StateHeader, entry, read_header, refused
from hvd_compress.requests import Collective
from hvd_compress.stats import Record
from hvd_compress.systems.base import Arrays, State

#: an exchange of a system: it yields requests, and returns what becomes of the replies
Exchange = Generator[Collective, Any, Any]


class Saved(NamedTuple):
    """The checked contents of a checkpoint; ``is_own``: it is this rank's."""

    header: StateHeader
    is_own: bool
    state: State


class Owner(abc.ABC):
    """Counts steps, exchanges and bytes, compares the ranks, carries out a system's exchanges, and
    saves and restores its state.  The messages of a system, and their use, are its own.

    Args:
        system: its name, in exchanges and checkpoints.
        like: an array of the kind in which ranks compare what must be equal; ``None`` for NumPy's.

    Attributes:
        engine: the engine between the ranks, which elastic training changes.
        step: the number of steps.
        exchanges: the number of steps in which this rank exchanged something.  Averages to be
            tested are no step; only their bytes are counted.
        state: the system's state.
        record: the bytes of exchanges.

    >>> from hvd_compress.engines.local import LocalEngine
    >>> class Mine(Owner):
    ...     engine = LocalEngine()
    ...     def terms(self):
    ...         return {"option": "1"}
    >>> Mine("mine").step
    0
    """

    engine: Engine

    def __init__(self, system: str, like: Array = None) -> None:
        self.system = system
        self.step = self.exchanges = 0
        self.state: State = {}
        self.record = Record()
        self._like = np.empty(0) if like is None else like

    @abc.abstractmethod
    def terms(self) -> Terms:
        """Return what must be the same on all ranks, as text."""

    def _agree(self, **more: str | list[str]) -> None:
        """Begin to compare the ranks' terms, and ``more``; the next exchange raises
        ``MismatchError`` if they differ."""
        self.engine.agree({**self.terms(), **more}, self._like)

    def meet(self, call: str) -> None:
        """Raise ``MismatchError`` unless all ranks are about to make this call, a collective
        between steps; one that has more batches is in a step."""
        self._agree(**{BETWEEN: call})
        self.engine.compare()

    def _ask(self, exchange: Exchange) -> Any:
        """Carry out an exchange, and return its result."""
        engine = self.engine
        own = counted(exchange, self.record, engine.rank, engine.size)
        return engine.run(self.system, own)

    def _saved(self, state: State, consolidated: bool = False, **more: Any) -> dict[str, Any]:
        """Return a state for a checkpoint, and ``more``."""
        engine, system = self.engine, {"method": self.system}
        header = StateHeader(system, self.step, engine.rank, engine.size, consolidated)
        return {**header.saved(), "state": _copied(state), **more}

    def _read(self, state_dict: Any, check: Callable[[str, Arrays], None]) -> Saved:
        """Return what :meth:`_saved` has returned, in memory of its own; nothing changes.

        Args:
            check: raises an error for arrays, under a key, that cannot be of this model.
        """
        header = read_header(state_dict)
        if (system := header.method["method"]) != self.system:
            raise refused(f"it is of {system}, and this is {self.system}")
        saved = entry(state_dict, "state", Mapping)
        state = {key: entry(saved, key, Mapping) for key in saved}
        for key, arrays in state.items():
            check(key, arrays)
        return Saved(header, header.is_own(self.engine), _copied(state))


def _copied(state: State) -> State:
    return {
        key: {name: backend_of(x).copy(x) for name, x in arrays.items()}
        for key, arrays in state.items()
    }
