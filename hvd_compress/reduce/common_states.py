"""The places of entries of states that tensors have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, State
from hvd_compress.errors import ConfigError


class ArrayType(NamedTuple):
    """The shape, dtype and device of an array; the last is ``None`` where arrays have none."""

    shape: tuple[int, ...]
    dtype: str
    device: Any


#: the keys and looks of entries; empty if a tensor has nothing in common with others
Kind = tuple[tuple[str, ArrayType], ...]


class CommonStates:
    """Finds the tensor, the *home*, whose state has what many tensors have in common (see
    :meth:`hvd_compress.base.Compressor.common`).

    There is none until an exchange returns such entries: then its tensor is their home for as long
    as they are there.  After a checkpoint they are found wherever they were saved.

    Args:
        names: returns the names of all tensors.
        state_of: returns the state of a tensor by name.
    """

    def __init__(
        self, names: Callable[[], Iterable[str]], state_of: Callable[[str], State]
    ) -> None:
        self._names, self._state_of = names, state_of
        self._looks: dict[str, Kind] = {}
        self._keys: dict[str, frozenset[str]] = {}
        self.forget()

    def forget(self) -> None:
        """Search for all homes again: states may have been replaced."""
        self._found: dict[Kind, str | None] = {}
        self.begin()

    def begin(self) -> None:
        self._taken: set[Kind] = set()

    def hand(self, name: str, common: Callable[[], State]) -> State:
        """Return the entries that tensor ``name`` shares, for its exchange; none as long as nobody
        has them.  ``common`` returns them as they are in the beginning.

        Raises:
            ConfigError: two tensors have them.
        """
        if name not in self._looks:
            fresh = common()
            self._looks[name], self._keys[name] = look_of(fresh), frozenset(fresh)
        home = self.home(name) if self._keys[name] else None
        return {} if home is None else _of(self._keys[name], self._state_of(home))

    def home(self, name: str) -> str | None:
        """Return the tensor that keeps what ``name`` shares, if there is one."""
        look = self._looks.get(name)
        if not look:
            return None
        if look not in self._found:
            keys = self._keys[name]
            having = [n for n in self._names() if look_of(_of(keys, self._state_of(n))) == look]
            if len(having) > 1:
                raise ConfigError(
                    f"the states of {having[0]!r} and {having[1]!r} both have {sorted(keys)}, of "
                    "which a model has one: take them out of one of the states, and load it again"
                )
            self._found[look] = having[0] if having else None
        return self._found[look]

    def split(self, name: str, state: State) -> tuple[State, dict[str, State]]:
        """Return an exchange's new state without what it shares, and this by the name of its home.
        If several exchanges of a step return new entries, those of the first count."""
        if not (keys := self._keys.get(name)):
            return state, {}
        shared, own = _of(keys, state), {k: x for k, x in state.items() if k not in keys}
        look, home = self._looks.get(name, ()), self.home(name)
        old = {} if home is None else self._state_of(home)
        new = {key: x for key, x in shared.items() if x is not old.get(key)}
        if not new or look in self._taken:
            return own, {}
        self._taken.add(look)
        self._found[look] = home = home or name
        return own, {home: new}

    def common(self, name: str, state: State) -> State:
        """Return the entries of a state that ``name`` shares."""
        return _of(self._keys.get(name, ()), state)

    def own(self, name: str, state: Mapping[str, object]) -> State:
        """Return a state without the entries that its tensor may have for others."""
        keys = self._keys.get(name, frozenset())
        shared = {key: state[key] for key in keys if key in state}
        if not shared or look_of(shared) != self._looks[name]:
            return dict(state)
        return {key: x for key, x in state.items() if key not in keys}


def look_of(state: State) -> Kind:
    """Return the keys, shapes, dtypes and devices of a state."""

    return tuple((key, look(state[key])) for key in sorted(state))


def look(x: Array) -> ArrayType:
    xp = backend_of(x)
    device = None if xp.traces else getattr(x, "device", None)
    return ArrayType(tuple(xp.shape(x)), xp.dtype(x), device)


def _of(keys: Iterable[str], state: State) -> State:
    return {key: state[key] for key in keys if key in state}
