"""Training that exchanges something else than gradients, over Horovod."""

from __future__ import annotations

from typing import Any

from hvd_compress.engines.base import Engine
from hvd_compress.systems import graphs
from hvd_compress.systems.teachers import CoordinatedSampler as CoordinatedSampler
from hvd_compress.systems.teachers import Decay as Decay
from hvd_compress.systems.teachers import Ramp as Ramp
from hvd_compress.systems.teachers.codistiller import codistillation_over

from ..eager import engine_of
from ..engine import HorovodEngine
from .codistillation import KerasCodistiller
from .local_training import factories

_MODULE = "hvd_compress.tensorflow.keras"


def _of_arrays(process_set: Any) -> Engine:
    return engine_of(process_set, "hvd_compress.local_steps.*")


def _of_tensors(process_set: Any) -> Engine:
    return engine_of(process_set, "hvd_compress.codistillation.*", HorovodEngine)


Codistillation = codistillation_over(KerasCodistiller, _of_tensors, _MODULE)
local_steps: Any
globals().update(factories(_of_arrays, _MODULE) | graphs.METHODS)
