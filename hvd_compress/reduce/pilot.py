"""What changes the method of a reducer while it trains."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hvd_compress.base import Array, Compressor

if TYPE_CHECKING:
    from hvd_compress.reduce.reducer import Reducer


class Pilot(abc.ABC):
    """Watches the steps of one reducer, and may change its method between two of them, in the same
    step on all ranks; a method makes it (:meth:`hvd_compress.base.Compressor.pilot`).

    A reducer tells it what happens, and saves its state in checkpoints.

    Attributes:
        method: what the reducer uses now.

    >>> reducer = Reducer("auto", LocalEngine())
    >>> isinstance(reducer.pilot, Pilot), reducer.method.name, reducer.pilot.facts()["phase"]
    (True, 'none', 'measuring')
    """

    method: Compressor

    @abc.abstractmethod
    def begins(self, reducer: Reducer) -> None:
        """A step begins; nothing of it is under way.  Here, too, the method may be changed."""

    def sees(self, reducer: Reducer) -> None:
        """A gradient is ready, before or after the step has begun.  This is called for every tensor
        in every step."""
        return

    def abandoned(self) -> None:
        """What has begun of a step is discarded."""
        return

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
        """Return what decides about the next change, which must be the same on all ranks."""

    @abc.abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return what is known and chosen, as plain values, for statistics."""

    @abc.abstractmethod
    def state(self) -> dict[str, Any]:
        """Return what :meth:`read` reads, as plain values that JSON can hold."""

    @abc.abstractmethod
    def read(self, state: Any) -> Pilot:
        """Return a new pilot that goes on from a state; ``None``: one that begins anew.

        Raises:
            ConfigError: it is damaged.
        """
