"""Drop-in for ``horovod.tensorflow.keras.elastic`` and ``horovod.keras.elastic``."""

from __future__ import annotations

import importlib
from typing import Any

from hvd_compress.integrations.horovod import rest_of

from ..elastic import TensorFlowKerasState


class KerasState(TensorFlowKerasState):
    """A model and its optimizer for ``hvd.elastic.run``.

    Args: as for :class:`hvd_compress.tensorflow.elastic.TensorFlowKerasState`.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, **kwargs)


def __getattr__(name: str) -> Any:
    """Return a name of Horovod's module that this one does not replace."""
    horovod = importlib.import_module("horovod.tensorflow.keras.elastic")
    return rest_of(horovod, name, __name__, "TensorFlow")
