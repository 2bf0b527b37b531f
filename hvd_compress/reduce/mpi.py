"""Averaging of gradients over mpi4py for custom training loops."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from hvd_compress import reduce
from hvd_compress.mpi.engine import MpiEngine
from hvd_compress.mpi.transport.communicator import Communicator


def Reducer(  # noqa: N802  # makes one, and is called like the class
    compression: Any = "none",
    *,
    comm: MPI.Comm | Communicator | None = None,
    **options: Any,
) -> reduce.Reducer:
    """Return a :class:`hvd_compress.reduce.Reducer` over MPI; making one is a collective.

    Args:
        compression: a method, its class, its name, or a string such as "dgc:density=0.01".
        comm: the communicator; ``None`` for all ranks.
        options: ``momentum``, ``nesterov``, ``sums``, ``seed``, ``bucket_bytes``.

    Example::

        reducer = mpi.Reducer("dgc:density=0.01", momentum=0.9)
        for x, y in batches:
            directions = reducer.reduce(gradients(weights, x, y))
            for name, direction in directions.items():
                weights[name] -= learning_rate * direction
        print(reducer.stats())
    """
    return reduce.Reducer(compression, MpiEngine(comm), **options)
