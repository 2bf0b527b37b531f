"""Training that exchanges something else than gradients, over MPI."""

from typing import Any

from hvd_compress.mpi.process_sets import engine_over
from hvd_compress.systems import graphs
from hvd_compress.systems.teachers import CoordinatedSampler as CoordinatedSampler
from hvd_compress.systems.teachers import Decay as Decay
from hvd_compress.systems.teachers import Ramp as Ramp
from hvd_compress.systems.teachers.codistiller import codistillation_over

from ..codistillation import KerasCodistiller
from ..local_training import factories

_MODULE = "hvd_compress.tensorflow.keras.mpi"

Codistillation = codistillation_over(KerasCodistiller, engine_over, _MODULE)
local_steps: Any
globals().update(factories(engine_over, _MODULE) | graphs.METHODS)
