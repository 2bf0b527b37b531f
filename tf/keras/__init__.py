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

from hvd_compress.integrations import horovod as drop_in
from hvd_compress.integrations.exports import *  # noqa: F403
from hvd_compress.integrations.exports import SYSTEMS
from hvd_compress.integrations.exports import __all__ as _methods
from hvd_compress.optimizers.outer import OuterSGD

from . import callbacks
from .models import KERAS_3, loader

#: what imports Keras 3, and its modules
OPTIMIZERS = {
    "LAMB": "optimizers",
    "LARS": "optimizers",
    "OneBitAdam": "optimizers",
    "OneBitLAMB": "optimizers",
    "SAM": "sharpness",
    "ScaledWarmup": "warmup",
    "ZeroOneAdam": "optimizers",
}

__all__ = [*_methods, "OuterSGD", "callbacks"]


def _register(module: Any) -> None:
    """Wrap what meets an optimizer in a module of Horovod."""
    from ..registration import register_keras
    from . import elastic

    own: dict[str, type] = {**callbacks.OF_HOROVOD}
    if module.__name__ == "horovod.keras":
        own = own | {"BestModelCheckpoint": callbacks.BestWholeModelCheckpoint}
    of_elastic = {
        "KerasState": elastic.KerasState,
        "TensorFlowKerasState": elastic.TensorFlowKerasState,
        "run": importlib.import_module("horovod.tensorflow.elastic").run,  # wrapped
    }
    register_keras(module, {"callbacks": own, "elastic": of_elastic})


_horovod: Any = drop_in.load_horovod("horovod.tensorflow.keras", "TensorFlow", _register)
_older: Any = drop_in.load_horovod("horovod.keras", "TensorFlow", _register)
if not isinstance(_horovod, ImportError):
    from ..distribute import wrap_optimizer
    from ..engine import runtime
    from . import elastic

    load_model = loader(runtime, __name__)
    if KERAS_3:
        _horovod.load_model = _older.load_model = load_model
    horovods_optimizer: Any = _horovod.DistributedOptimizer
    horovods_partial: Any = _older.PartialDistributedOptimizer
    DistributedOptimizer = wrap_optimizer(runtime, horovods_optimizer, horovods_optimizer)
    PartialDistributedOptimizer = wrap_optimizer(runtime, horovods_partial, horovods_partial)
    __all__ += ["PartialDistributedOptimizer", "elastic", "load_model"]


def __getattr__(name: str) -> Any:
    """Return the optimizers, and other names of ``horovod.tensorflow.keras`` and
    ``horovod.keras``."""
    if name in OPTIMIZERS:
        return getattr(importlib.import_module(f"{__name__}.{OPTIMIZERS[name]}"), name)
    if name in SYSTEMS and not isinstance(_horovod, ImportError):
        local_training = importlib.import_module(f"{__name__}.local_training")
        return local_training.systems_over(runtime, __name__)[name]
    only_older = hasattr(_older, name) and not hasattr(_horovod, name)
    return drop_in.rest_of(_older if only_older else _horovod, name, __name__, "TensorFlow")


def __dir__() -> list[str]:
    return sorted(
        {
            *drop_in.names_of(_horovod, [*__all__, *OPTIMIZERS, *SYSTEMS]),
            *drop_in.names_of(_older, []),
        }
    )
