"""The form of an algorithm of a sparse allreduce, which loses nothing."""

from __future__ import annotations

from collections.abc import Callable, Generator

from hvd_compress.base import Sparse
from hvd_compress.meetings.sparse_vectors import Vector
from hvd_compress.mpi.sparse.messages import Format
from hvd_compress.mpi.transport.channel import Channel
from hvd_compress.mpi.transport.progress import Wait

#: what an algorithm returns: the result, and what rounding took off on this rank
Summed = Generator[Wait, None, tuple[Vector, Sparse]]
#: ``run(channel, mine, form)``; one module has one, under its own name
Run = Callable[[Channel, Sparse, Format], Summed]
