"""Training that exchanges something else than gradients, over Horovod."""

from __future__ import annotations

from typing import Any

from hvd_compress.engines.base import Engine

from ..eager import engine_of
from ..engine import HorovodEngine
from .local_training import systems_over


def _of_arrays(process_set: Any) -> Engine:
    return engine_of(process_set, "hvd_compress.local_steps.*")


def _of_tensors(process_set: Any) -> Engine:
    return engine_of(process_set, "hvd_compress.codistillation.*", HorovodEngine)


local_steps: Any
globals().update(systems_over(_of_arrays, _of_tensors, "hvd_compress.tensorflow.keras"))
