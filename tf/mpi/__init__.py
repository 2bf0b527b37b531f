"""TensorFlow over MPI alone, without Horovod::

    import hvd_compress.tensorflow.mpi as hvd

    hvd.init()
    tape = hvd.DistributedGradientTape(tape, compression=hvd.DGC(momentum=0.9))

then ``mpirun -np 16 python train.py``.  Functions and options are those of ``horovod.tensorflow``,
so a script changes one line.  For Keras see ``hvd_compress.tensorflow.keras.mpi``.

Messages are sent from host memory, and sums are added in rank order, so every run has the same
bits.
"""

from __future__ import annotations

from typing import Any

from hvd_compress.integrations.exports import *  # noqa: F403
from hvd_compress.integrations.exports import __all__ as _methods
from hvd_compress.integrations.horovod import check_server
from hvd_compress.integrations.mpi import *  # noqa: F403
from hvd_compress.integrations.mpi import __all__ as _names
from hvd_compress.integrations.mpi import missing

from . import collectives, training
from .collectives import *  # noqa: F403
from .training import *  # noqa: F403

__all__ = [*_methods, *_names, *collectives.__all__, *training.__all__]


def __getattr__(name: str) -> Any:
    check_server(name)
    raise missing(name, __name__)


__dir__ = __all__.copy
