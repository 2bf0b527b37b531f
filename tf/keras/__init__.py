"""Drop-in for ``horovod.tensorflow.keras`` and ``horovod.keras`` with gradient compression::

    import hvd_compress.tensorflow.keras as hvd

    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, compression=hvd.DGC)

For Keras 3 on TensorFlow, where Horovod's own optimizer trains without exchanging gradients, and
for tf_keras (``TF_USE_LEGACY_KERAS=1``).
"""

from __future__ import annotations

import importlib
from typing import Any

from hvd_compress import drop_in
from hvd_compress.tensorflow import *  # noqa: F403
from hvd_compress.tensorflow import __all__ as _methods
from hvd_compress.tensorflow.keras import callbacks
from hvd_compress.tensorflow.keras.models import load_model
from hvd_compress.tensorflow.registration import (
    drop_in_optimizer as DistributedOptimizer,  # noqa: N812
)
from hvd_compress.tensorflow.registration import register_keras

__all__ = [*_methods, "DistributedOptimizer", "callbacks", "load_model"]


#: those that import Keras 3, and their modules
_OPTIMIZERS = {"OneBitAdam": "onebit_adam", "ZeroOneAdam": "zero_one_adam"}

_horovod = drop_in.load_horovod("horovod.tensorflow.keras", "TensorFlow", register_keras)


def __getattr__(name: str) -> Any:
    """The optimizers, and the rest of ``horovod.tensorflow.keras``."""
    if name in _OPTIMIZERS:
        return getattr(importlib.import_module(f"{__name__}.{_OPTIMIZERS[name]}"), name)
    return drop_in.rest_of(_horovod, name, __name__, "TensorFlow")


def __dir__() -> list[str]:
    return drop_in.names_of(_horovod, globals())
