"""``mpirun -np 2 python mpi_large.py``: more than 2^31 bytes, too many for a count of 32 bits."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from hvd_compress import mpi

N = 2**31 + 11


def main() -> None:
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    x = np.empty(N, np.uint8)
    for algorithm in ("ring", "halving_doubling", "direct"):
        x[:] = rank + 1
        x[[0, N // 2, N - 1]] = [10 + rank, 20 + rank, 30 + rank]
        mpi.allreduce(x, algorithm=algorithm, out=x)
        assert (x[1 : N // 2] == sum(range(1, size + 1))).all()
        assert (x[N // 2 + 1 : -1] == sum(range(1, size + 1))).all()
        assert x[[0, N // 2, N - 1]].tolist() == [sum(range(a, a + size)) for a in (10, 20, 30)]


if __name__ == "__main__":
    main()
