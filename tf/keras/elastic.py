"""Drop-in for ``horovod.tensorflow.keras.elastic`` and ``horovod.keras.elastic``."""

from __future__ import annotations

import importlib
from typing import Any

from hvd_compress.integrations.horovod import rest_of

from ..elastic import TensorFlowKerasState

#: Horovod's name for it in Keras
KerasState = TensorFlowKerasState


def __getattr__(name: str) -> Any:
    """Return a name of Horovod's module that this one does not replace."""
    horovod = importlib.import_module("horovod.tensorflow.keras.elastic")
    return rest_of(horovod, name, __name__, "TensorFlow")
