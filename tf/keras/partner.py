"""The base class of the optimizers that come with a compression of their own, for Keras 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import keras

from hvd_compress.errors import ConfigError

from ..binding import Binding


class PartnerOptimizer(keras.optimizers.Optimizer):
    """An optimizer that knows what its compression returns in the place of gradients."""

    #: the compression that fits
    method: ClassVar[type]
    #: options that the compression has as well: attributes, and arguments
    schedule: ClassVar[tuple[str, ...]]
    #: options of Keras that change what the compression returns as if it were gradients
    refused: ClassVar[tuple[str, ...]] = ("clipnorm", "clipvalue", "global_clipnorm")

    def __init__(
        self,
        learning_rate: Any,
        weight_decay: float | None,
        name: str,
        options: Mapping[str, Any],
        **schedule: Any,
    ) -> None:
        super().__init__(learning_rate, weight_decay=weight_decay, name=name, **options)
        for option in self.schedule:
            setattr(self, option, schedule[option])
        self._binding: Binding | None = None
        self._places: dict[int, int] = {}

    def compressor(self, **options: Any) -> Any:
        """Return the compression that belongs to this optimizer; ``options`` are those that the
        optimizer does not determine."""
        return self.method(**self.compression_options(), **options)

    def compression_options(self) -> dict[str, Any]:
        """Return the options of the compression that the optimizer determines."""
        return {name: getattr(self, name) for name in self.schedule}

    def follow(self, binding: Binding, places: Mapping[int, int]) -> None:
        """Take ``binding`` for the one that averages.  What it returns for variables may be momenta
        instead of gradients; ``places`` are its slots by the ids of variables.

        Raises:
            ConfigError: an option would be applied to these.
        """
        for option in self.refused:
            if getattr(self, option) is not None:
                raise ConfigError(
                    f"{option}={getattr(self, option)} would change what "
                    f"{binding.method.name!r} returns, which are no gradients: drop it, or do the "
                    "same to the gradients before optimizer.apply"
                )
        self._binding, self._places = binding, dict(places)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {name: getattr(self, name) for name in self.schedule}
