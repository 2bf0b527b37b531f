"""``python cluster_worker.py FOLDER``: exchange dense and sparse gradients until something breaks.

Each rank leaves ``FOLDER/RANK.ready`` when training is on its way, and ``FOLDER/RANK.error`` with
name, message and time of the error that ended it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

TIMEOUT = 5.0


def main(folder: Path) -> None:
    import numpy as np
    from mpi4py import MPI

    from hvd_compress import mpi
    from hvd_compress.errors import CompressionError

    comm = mpi.Communicator(timeout=TIMEOUT)
    reducers = [mpi.Reducer(method, comm=comm) for method in ("none", "topk:density=0.01")]
    gradient = np.random.default_rng(comm.rank).standard_normal(2_000_000).astype(np.float32)
    try:
        for step in range(10_000):
            for reducer in reducers:
                reducer.reduce({"a": gradient, "b": gradient[:1000]})
            mpi.allreduce(gradient, algorithm="ring", comm=comm)
            if step == 2:
                (folder / f"{comm.rank}.ready").touch()
    except (CompressionError, MPI.Exception) as error:
        text = f"{type(error).__name__}\n{error}\n{time.time()}\n"
        (folder / f"{comm.rank}.error").write_text(text)
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]))
