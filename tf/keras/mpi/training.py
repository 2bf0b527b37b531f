"""Training that exchanges something else than gradients, over MPI."""

from typing import Any

from hvd_compress.mpi.process_sets import engine_over

from ..local_training import systems_over

local_steps: Any
globals().update(systems_over(engine_over, engine_over, "hvd_compress.tensorflow.keras.mpi"))
