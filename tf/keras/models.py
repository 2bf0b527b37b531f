"""Loading a model to go on with training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensorflow import keras

from hvd_compress.methods import NoCompression
from hvd_compress.tensorflow.optimizer import distribute


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = NoCompression,
    **options: Any,
) -> Any:
    """A saved model whose optimizer is distributed, with its state and that of the compression.

    Args:
        custom_optimizers: classes beyond those of ``keras.optimizers``.
        custom_objects: as for ``keras.models.load_model``.
        options: of :func:`DistributedOptimizer`.
    """
    base = keras.optimizers.Optimizer
    classes = [
        thing
        for thing in vars(keras.optimizers).values()
        if isinstance(thing, type) and issubclass(thing, base) and thing is not base
    ]

    def wrap(cls: Any) -> Any:
        class Loader(cls):  # type: ignore[misc]
            @classmethod
            def from_config(own, config: Any, custom_objects: Any = None) -> Any:  # noqa: N804
                return distribute(cls.from_config(config), compression=compression, **options)

        Loader.__name__, Loader.__module__ = cls.__name__, cls.__module__
        return Loader

    wrapped = {cls.__name__: wrap(cls) for cls in [*classes, *(custom_optimizers or [])]}
    return keras.models.load_model(filepath, custom_objects={**wrapped, **(custom_objects or {})})
