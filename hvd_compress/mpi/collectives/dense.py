"""The algorithms of a dense allreduce."""

from importlib import import_module

from hvd_compress.mpi.collectives.dense_algorithm import Allreduce
from hvd_compress.requests.algorithms import DENSE

#: by name, each in the file of that name
ALGORITHMS: dict[str, Allreduce] = {
    name: import_module(f"{__name__}_{name}").ALGORITHM for name in DENSE
}
