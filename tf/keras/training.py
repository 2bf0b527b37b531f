"""Training that exchanges something else than gradients, over Horovod."""

from __future__ import annotations

import functools

from ..engine import HorovodEngine, engine_of
from .local_training import systems_over, train_locally

_of_arrays = functools.partial(engine_of, prefix="hvd_compress.local_steps.*")
_of_tensors = functools.partial(
    engine_of, prefix="hvd_compress.codistillation.*", kind=HorovodEngine
)

train = functools.partial(train_locally, _of_arrays)
globals().update(systems_over(_of_tensors, "hvd_compress.tensorflow.keras"))
