"""The contract of a chooser, which changes the method of a reducer once while it trains."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hvd_compress.base import Array, Compressor

if TYPE_CHECKING:
    from hvd_compress.reduce.reducer import Reducer


class Chooser(abc.ABC):
    """Watches the first steps of one reducer, and changes its method once, after the same step on
    all ranks.  A method makes it (:meth:`hvd_compress.base.Compressor.chooser`).

    Attributes:
        method: what the reducer uses now; until the choice it is one without a state.

    >>> reducer = Reducer("auto", LocalEngine())
    >>> isinstance(reducer.chooser, Chooser), reducer.method.name, reducer.chooser.state()["phase"]
    (True, 'none', 'measuring')
    """

    method: Compressor

    @abc.abstractmethod
    def sees(self, reducer: Reducer) -> None:
        """A gradient is ready, before the step begins or after.  This is called for every tensor in
        every step."""

    @abc.abstractmethod
    def abandoned(self) -> None:
        """The step that has begun is discarded."""

    @abc.abstractmethod
    def ended(
        self, reducer: Reducer, gradients: Mapping[str, Array], directions: Mapping[str, Array]
    ) -> None:
        """A step is over on all ranks: exchanges may follow, and the method be changed.

        Args:
            gradients: by name; their memory may hold anything by now.
            directions: what the optimizer gets, equal on all ranks.
        """

    @abc.abstractmethod
    def progress(self) -> str:
        """Return what decides about the choice, which must be the same on all ranks."""

    @abc.abstractmethod
    def state(self) -> dict[str, Any]:
        """Return what is known and chosen, as plain values that JSON can hold."""

    @abc.abstractmethod
    def read(self, state: Any) -> Chooser:
        """Return a new chooser that goes on from a state; ``None``: one that begins anew.

        Raises:
            ConfigError: it is damaged.
        """
