"""Keras over MPI alone, without Horovod::

    import hvd_compress.tensorflow.keras.mpi as hvd

    hvd.init()
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, compression=hvd.DGC)

then ``mpirun -np 16 python train.py``.  For Keras 3 on TensorFlow, and for tf_keras
(``TF_USE_LEGACY_KERAS=1``).  Names and options are those of ``hvd_compress.tensorflow.keras``.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from hvd_compress.integrations.exports import SYSTEMS
from hvd_compress.integrations.horovod import check_server
from hvd_compress.integrations.mpi import missing
from hvd_compress.optimizers.outer import OuterSGD

from .. import keras as _keras
from .. import mpi as _tensorflow
from ..mpi import *  # noqa: F403
from ..mpi.engine import runtime
from ..mpi.training import PartialDistributedOptimizer
from . import OPTIMIZERS
from . import mpi_callbacks as callbacks
from .models import loader

#: so that it can be imported by this name, as ``os.path`` can
sys.modules[f"{__name__}.callbacks"] = callbacks
load_model = loader(runtime, __name__)

__all__ = [
    *_tensorflow.__all__,
    "OuterSGD",
    "PartialDistributedOptimizer",
    "callbacks",
    "load_model",
]


def __getattr__(name: str) -> Any:
    """Return what imports Keras 3."""
    if name in OPTIMIZERS:
        return getattr(_keras, name)
    if name in SYSTEMS:
        local_training = importlib.import_module("hvd_compress.tensorflow.keras.local_training")
        return local_training.systems_over(runtime, __name__)[name]
    check_server(name)
    raise missing(name, __name__)


def __dir__() -> list[str]:
    return sorted({*__all__, *OPTIMIZERS, *SYSTEMS})
