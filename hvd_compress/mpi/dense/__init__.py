"""Collectives of arrays that are sent whole."""

from importlib import import_module

from hvd_compress.mpi.dense.algorithm import Allreduce
from hvd_compress.requests.algorithms import DENSE

#: algorithms of a dense allreduce, by name
ALGORITHMS: dict[str, Allreduce] = {
    name: import_module(f"{__name__}.{name}").ALGORITHM for name in DENSE
}
