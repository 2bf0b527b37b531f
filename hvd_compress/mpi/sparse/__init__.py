"""Sums of vectors that are given by indices and values."""

from importlib import import_module

from hvd_compress.mpi.sparse.messages import Run
from hvd_compress.requests.algorithms import SPARSE

#: algorithms of a sparse allreduce, by name
ALGORITHMS: dict[str, Run] = {
    name: getattr(import_module(f"{__name__}.{name}"), name) for name in SPARSE
}
