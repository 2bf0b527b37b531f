"""Loading a model to go on with training."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensorflow import keras

from hvd_compress.config import as_tuple, check_choice
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.integrations.horovod import chosen

from ..distribute import distribute, is_tf_keras
from ..runtime import Runtime

#: what ``tf.keras`` is; otherwise it is tf_keras
KERAS_3 = keras.Model.__module__.startswith("keras.")


def loader(runtime: Runtime, module: str) -> Callable[..., Any]:
    """Return ``load_model`` over a runtime; it belongs to ``module``."""
    none = runtime.hvd.Compression.none

    def load_model(
        filepath: Any,
        custom_optimizers: Sequence[type] | None = None,
        custom_objects: Mapping[str, Any] | None = None,
        compression: Any = none,
        legacy_opts: bool = False,
        **options: Any,
    ) -> Any:
        """Load a saved model with a distributed optimizer, whose state, and that of the compression
        if it was saved, are restored.

        Args:
            filepath: of a ``.keras`` file.
            custom_optimizers: classes beyond those of ``keras.optimizers``.
            custom_objects: as for ``keras.models.load_model``.
            compression, options: of :func:`DistributedOptimizer`.
            legacy_opts: must be false.

        Raises:
            ConfigError: the model was saved without an optimizer.
            UnsupportedError: the model or its optimizer is one of tf_keras.
        """
        classes = as_tuple("custom_optimizers")(
            () if custom_optimizers is None else custom_optimizers
        )
        if not all(isinstance(cls, type) for cls in classes):
            raise ConfigError(f"custom_optimizers must be classes; got {custom_optimizers!r}")
        if not isinstance(custom_objects, Mapping | None):
            raise ConfigError(f"custom_objects must be a dict; got {custom_objects!r}")
        check_choice("legacy_opts", legacy_opts, (False, True))
        if legacy_opts:
            raise UnsupportedError(
                "legacy_opts=True: optimizers of tf_keras.optimizers.legacy are not supported; "
                "save the model with one of keras.optimizers"
            )
        if KERAS_3:
            importlib.import_module("hvd_compress.tensorflow.keras.optimizers")  # known from now on
        known = {cls.__name__: cls for cls in classes}
        model = keras.models.load_model(
            filepath, custom_objects={**known, **(custom_objects or {})}
        )
        if getattr(model, "optimizer", None) is None:
            raise ConfigError(
                f"{filepath} has no optimizer: load it with keras.models.load_model, and compile "
                "it with hvd.DistributedOptimizer"
            )
        if is_tf_keras(model.optimizer):
            raise UnsupportedError(
                "load_model is for Keras 3: load the model with tf_keras, and compile it with "
                "hvd.DistributedOptimizer"
            )
        compression = chosen(compression, none, runtime.hvd.rank)
        model.optimizer = distribute(runtime, model.optimizer, compression=compression, **options)
        model.load_weights(filepath)  # once more, for what a plain optimizer does not look for
        return model

    load_model.__module__, load_model.__qualname__ = module, "load_model"
    return load_model
