"""Training that exchanges something else than gradients, over MPI."""

import functools

from hvd_compress.mpi.process_sets import engine_over

from ..local_training import systems_over, train_locally

train = functools.partial(train_locally, engine_over)
globals().update(systems_over(engine_over, "hvd_compress.tensorflow.keras.mpi"))
