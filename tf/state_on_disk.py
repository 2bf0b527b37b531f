"""The state of a compressed optimizer in Keras's own files (``.keras``, ``.weights.h5``).

Keras saves an optimizer's attributes that can be saved, each in a place of its own, and looks when
loading only for those that it knows: a plain optimizer finds its own variables, no more and no
less, and does not notice these.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_compress.integrations.checkpoints import unconsolidated

from .binding import Binding


def state_on_disk(
    binding: Binding,
    call: str = "optimizer.compression.consolidate()",
    is_complete: Callable[[], bool] | None = None,
) -> Any:
    """Return an object that Keras saves, and which holds the state of the binding.

    Args:
        call: what makes the state of one rank serve all.
        is_complete: whether that has been done, if the binding does not know.
    """
    import keras

    def serves_all() -> bool:
        return binding.is_consolidated if is_complete is None else is_complete()

    class StateOnDisk(keras.layers.Layer):
        """No layer; but layers are what Keras lets others define the saving of."""

        def save_own_variables(self, store: Any) -> None:
            if binding.engine.size > 1 and not serves_all():
                warnings.warn(unconsolidated(call), stacklevel=2)
            for name, array in binding.values().items():
                store[name] = array

        def load_own_variables(self, store: Any) -> None:
            if not store.keys():
                return  # saved by a plain optimizer
            arrays = {name: np.asarray(store[name]) for name in store.keys()}  # noqa: SIM118
            binding.load_values(arrays)

    return StateOnDisk(name="compression_on_disk")
