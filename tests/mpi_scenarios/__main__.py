"""``python -m tests.mpi_scenarios FOLDER MODULE...``: run them, write what each rank found."""

import sys
import warnings

from mpi4py import MPI

from hvd_compress import NeedsTuning, PoorFit
from tests.scenarios import run_all, scenarios

folder, *modules = sys.argv[1:]
warnings.simplefilter("error")
warnings.filterwarnings("ignore", category=PoorFit)  # a few steps teach nothing
warnings.filterwarnings("ignore", category=NeedsTuning)
functions = {
    name: function
    for module in modules
    for name, function in scenarios(
        module, "mpi_scenarios", over="mpi", ranks=MPI.COMM_WORLD.size
    ).items()
}
run_all(folder, MPI.COMM_WORLD.rank, functions, MPI.COMM_WORLD.Barrier)
