"""The algorithms of a sparse allreduce."""

from importlib import import_module

from hvd_compress.mpi.collectives.sparse_messages import Run
from hvd_compress.requests.algorithms import SPARSE

#: by name, each in the file of that name
ALGORITHMS: dict[str, Run] = {
    name: getattr(import_module(f"{__name__}_{name}"), name) for name in SPARSE
}
