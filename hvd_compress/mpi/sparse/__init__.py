"""Sums of vectors that are given by indices and values."""

from importlib import import_module

from hvd_compress.mpi.sparse.algorithm import SparseAllreduce
from hvd_compress.requests.algorithms import SPARSE

#: algorithms of a sparse allreduce, by name
ALGORITHMS: dict[str, SparseAllreduce] = {
    name: import_module(f"{__name__}.{name}").ALGORITHM for name in SPARSE
}
