"""The states of before a step, which are put back if its averages are not used.

An exchange takes what it sends out of residuals and velocities.  If nobody applies the average,
that part of earlier gradients would be lost, and what the discarded gradients left would stay.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hvd_compress.backends import backend_of
from hvd_compress.base import State
from hvd_compress.reduce.store import Store


class Undo:
    """Copies of states, taken before the first exchange of a step changes them in place.

    Args:
        store: keeps the states.

    Attributes:
        step: the number of the step that can be undone as a whole, or ``None``.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._states = store, dict[str, State]()
        self.step: Any = None

    def keep(self, names: Iterable[str]) -> None:
        """Copy the states of tensors, unless this step has done so."""
        for name in names:
            if name not in self._states:
                state = self._store.get(name)
                self._states[name] = {key: backend_of(x).copy(x) for key, x in state.items()}

    def put_back(self, names: Iterable[str]) -> None:
        """Give tensors the states of before the step; one that is new has none."""
        for name in names:
            self._store.put_back(name, self._states.get(name, {}))

    def forget(self) -> None:
        """Keep nothing any more: the averages were used, or other states have come."""
        self._states, self.step = {}, None
