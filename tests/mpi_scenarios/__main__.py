"""``python -m mpi_scenarios FOLDER MODULE...``: run all scenarios, write what each rank found."""

import json
import os
import sys
import traceback
import warnings
from pathlib import Path

from mpi4py import MPI

from scenarios import scenarios

folder, *modules = sys.argv[1:]
warnings.simplefilter("error")
comm = MPI.COMM_WORLD
with (Path(folder) / str(comm.rank)).open("a") as log:
    for module in modules:
        for name, function in scenarios(module, "mpi_scenarios").items():
            problem = None
            try:
                function()
                comm.Barrier()
            except Exception:
                problem = traceback.format_exc()
            print(json.dumps([f"{module}.{name}", problem]), file=log, flush=True)
            if problem:
                print(problem, file=sys.stderr, flush=True)
                os._exit(1)  # the others wait for messages that will not come
