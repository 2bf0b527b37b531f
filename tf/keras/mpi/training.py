"""Training that exchanges something else than gradients, over MPI."""

from hvd_compress.mpi.process_sets import engine_over
from hvd_compress.systems import graphs

from ..codistillation import codistillation_over
from ..local_training import factories

_MODULE = "hvd_compress.tensorflow.keras.mpi"

Codistillation = codistillation_over(engine_over, _MODULE)
local_steps, _of_methods = factories(engine_over, _MODULE)
globals().update(_of_methods | graphs.METHODS)
