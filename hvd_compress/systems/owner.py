"""The owner of a system on one rank: what all systems that meet over an engine do alike."""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Mapping
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.agreement import Terms
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
    arrived: State


class Owner:
    """Counts steps, exchanges and bytes, compares the ranks, carries out a system's exchanges, and
    saves and restores its state.  One exchange may be under way while other steps are taken.

    The messages of a system, and their use, are its own pure functions.

    Args:
        system: its name, in exchanges and checkpoints.
        engine: returns the engine between the ranks, which elastic training changes.
        terms: returns what ranks have to agree about before an exchange.
        like: an array of the kind in which they compare it; ``None`` for NumPy's.

    Attributes:
        step: the number of steps.
        exchanges: the number of steps in which ranks exchanged something.
        state: the system's state.
        record: the bytes of exchanges.

    >>> from hvd_compress.engines.local import LocalEngine
    >>> from hvd_compress.requests import Sum
    >>> def exchange(x):
    ...     return (yield Sum(x))
    >>> Owner("mine", LocalEngine, lambda: {"option": "1"}).ask(exchange(np.ones(2)))
    array([1., 1.])
    """

    def __init__(
        self,
        system: str,
        engine: Callable[[], Engine],
        terms: Callable[[], Terms],
        like: Array = None,
    ) -> None:
        self.system = system
        self.step = self.exchanges = 0
        self.state: State = {}
        self.record = Record()
        self.like = np.empty(0) if like is None else like
        self._engine, self._terms = engine, terms
        self._wait: Callable[[], State] | None = None  # for what is in flight
        self._arrived: State = {}  # what came in before the system asked for it

    @property
    def engine(self) -> Engine:
        """The engine between the ranks."""
        return self._engine()

    # -- exchanges ---------------------------------------------------------------------------

    def agree(self, **more: str | list[str]) -> None:
        """Begin to compare the ranks' terms, and ``more``; the next exchange raises
        ``MismatchError`` if they differ."""
        self.engine.agree({**self._terms(), **more}, self.like)

    def ask(self, exchange: Exchange) -> Any:
        """Carry out an exchange at once, and return its result."""
        self.bring_in()  # an engine finishes all that is in flight
        return self._submitted(exchange)()

    def start(self, exchange: Exchange) -> None:
        """Begin an exchange, whose result is :meth:`arrived`."""
        self.expect(self._submitted(exchange))

    def expect(self, wait: Callable[[], State]) -> None:
        """Note what is in flight: ``wait`` returns what arrives, something."""
        self._wait = wait

    def _submitted(self, exchange: Exchange) -> Callable[[], Any]:
        engine, name = self.engine, self.system
        engine.start(name, counted(exchange, self.record, engine.rank, engine.size))
        return lambda: engine.finish()[name]

    @property
    def is_in_flight(self) -> bool:
        """Whether something was started that has not come in."""
        return self._wait is not None

    def poll(self) -> None:
        """Move on what is in flight, without waiting."""
        if self.is_in_flight:
            self.engine.poll()

    def bring_in(self) -> None:
        """Wait for what is in flight, before the system asks for it."""
        if self._wait is not None:
            self._arrived = self._wait()
            self._wait = None

    def arrived(self) -> State:
        """Return what was started, when it has come in."""
        self.bring_in()
        found, self._arrived = self._arrived, {}
        return found

    def forget(self, names: Mapping[str, Any]) -> None:
        """Leave arrays out of the state, and of what has come in."""
        self.state, self._arrived = _without(names, self.state), _without(names, self._arrived)

    def restart(self) -> None:
        """Forget the state, and what is under way."""
        self.state, self._wait, self._arrived = {}, None, {}

    # -- checkpoints -------------------------------------------------------------------------

    def state_dict(self, *, consolidated: bool = False, **more: Any) -> dict[str, Any]:
        """Return the state for a checkpoint, and ``more``; what is in flight comes in first."""
        self.bring_in()
        engine, system = self.engine, {"method": self.system}
        return {
            **StateHeader(system, self.step, engine.rank, engine.size, consolidated).saved(),
            "state": _copied(self.state),
            "arrived": _copied(self._arrived),
            **more,
        }

    def read(self, state_dict: Any, check: Callable[[str, Arrays], None]) -> Saved:
        """Return what :meth:`state_dict` has saved, in memory of its own; nothing changes.

        Args:
            check: raises an error for arrays, under a key, that cannot be of this model.
        """
        saved = read_header(state_dict)
        if (system := saved.method["method"]) != self.system:
            raise refused(f"it is of {system}, and this is {self.system}")
        return Saved(
            saved,
            saved.is_own(self.engine),
            _checked(state_dict, "state", check),
            _checked(state_dict, "arrived", check),
        )

    def restore(self, saved: Saved, own: Container[str]) -> None:
        """Go on from what was saved; of another rank's, without the keys ``own``."""
        self._wait, self.step = None, saved.header.step
        without = () if saved.is_own else own
        self.state = {key: x for key, x in saved.state.items() if key not in without}
        self._arrived = {key: x for key, x in saved.arrived.items() if key not in without}


def _checked(state_dict: Any, entry_: str, check: Callable[[str, Arrays], None]) -> State:
    found: State = {}
    for key in (saved := entry(state_dict, entry_, Mapping)):
        arrays = entry(saved, key, Mapping)
        check(key, arrays)
        found[key] = arrays
    return _copied(found)


def _without(names: Mapping[str, Any], state: State) -> State:
    return {
        key: {name: x for name, x in arrays.items() if name not in names}
        for key, arrays in state.items()
    }


def _copied(state: State) -> State:
    return {
        key: {name: backend_of(x).copy(x) for name, x in arrays.items()}
        for key, arrays in state.items()
    }
