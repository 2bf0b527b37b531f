"""Drop-in for ``horovod.tensorflow.keras`` and ``horovod.keras`` with gradient compression::

    import hvd_compress.tensorflow.keras as hvd

    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, compression=hvd.DGC)

For Keras 3 on TensorFlow, where Horovod's own optimizer trains without exchanging gradients, and
for tf_keras (``TF_USE_LEGACY_KERAS=1``).
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from hvd_compress.integrations import horovod as drop_in
from hvd_compress.training import CoordinatedSampler, Decay, OuterSGD, Ramp
from hvd_compress.training.factories import METHODS

from .. import *  # noqa: F403
from .. import __all__ as _methods
from ..registration import register_keras, wrap_optimizer
from . import callbacks, elastic
from .models import KERAS_3, load_model

#: what imports Keras 3, and its modules
_OPTIMIZERS = {
    "ASAM": "sharpness",
    "Codistillation": "codistillation",
    "DeMo": "demo",
    "LAMB": "layerwise",
    "LARS": "layerwise",
    "OneBitAdam": "onebit_adam",
    "OneBitLAMB": "onebit_lamb",
    "SAM": "sharpness",
    "ScaledWarmup": "warmup",
    "ZeroOneAdam": "zero_one_adam",
    "local_steps": "local_training",
    **{cls.__name__: "local_training" for cls in METHODS},
}

_elastic = {
    "KerasState": elastic.KerasState,
    "TensorFlowKerasState": elastic.TensorFlowKerasState,
    "run": importlib.import_module("horovod.tensorflow.elastic").run,  # wrapped
}
_whole_models = {"BestModelCheckpoint": callbacks.BestWholeModelCheckpoint}
_horovod: Any = drop_in.load_horovod(
    "horovod.tensorflow.keras",
    "TensorFlow",
    functools.partial(
        register_keras, replacements={"callbacks": callbacks.OF_HOROVOD, "elastic": _elastic}
    ),
)
_older: Any = drop_in.load_horovod(
    "horovod.keras",
    "TensorFlow",
    functools.partial(
        register_keras,
        replacements={"callbacks": callbacks.OF_HOROVOD | _whole_models, "elastic": _elastic},
    ),
)
if KERAS_3:
    _horovod.load_model = _older.load_model = load_model
DistributedOptimizer = wrap_optimizer(_horovod.DistributedOptimizer, every_keras=True)
PartialDistributedOptimizer = wrap_optimizer(_older.PartialDistributedOptimizer, every_keras=True)

__all__ = [
    *_methods,
    "CoordinatedSampler",
    "Decay",
    "OuterSGD",
    "PartialDistributedOptimizer",
    "Ramp",
    "callbacks",
    "elastic",
    "load_model",
]


def __getattr__(name: str) -> Any:
    """Return the optimizers, and other names of ``horovod.tensorflow.keras`` and
    ``horovod.keras``."""
    if name in _OPTIMIZERS:
        return getattr(importlib.import_module(f"{__name__}.{_OPTIMIZERS[name]}"), name)
    only_older = hasattr(_older, name) and not hasattr(_horovod, name)
    return drop_in.rest_of(_older if only_older else _horovod, name, __name__, "TensorFlow")


def __dir__() -> list[str]:
    return sorted(
        {*drop_in.names_of(_horovod, [*__all__, *_OPTIMIZERS]), *drop_in.names_of(_older, [])}
    )
