"""Loading a model to go on with training."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from tensorflow import keras

from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.tensorflow.optimizer import distribute, is_tf_keras


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = None,
    **options: Any,
) -> Any:
    """A saved model whose optimizer is distributed, with its state and, if it has been saved, that
    of the compression.

    Args:
        filepath: of a ``.keras`` file.
        custom_optimizers: classes beyond those of ``keras.optimizers``.
        custom_objects: as for ``keras.models.load_model``.
        compression, options: of :func:`DistributedOptimizer`.

    Raises:
        ConfigError: the model was saved without an optimizer.
    """
    if keras.__version__.startswith("3"):
        for module in ("onebit_adam", "zero_one_adam"):  # known from now on
            importlib.import_module(f"hvd_compress.tensorflow.keras.{module}")
    known = {cls.__name__: cls for cls in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**known, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is None:
        raise ConfigError(
            f"{filepath} has no optimizer: load it with keras.models.load_model, and compile it "
            "with hvd.DistributedOptimizer"
        )
    if is_tf_keras(model.optimizer):
        raise UnsupportedError(
            "load_model is for Keras 3: load the model with tf_keras, and compile it with "
            "hvd.DistributedOptimizer"
        )
    model.optimizer = distribute(model.optimizer, compression=compression, **options)
    model.load_weights(filepath)  # once more, for what a plain optimizer does not look for
    return model
