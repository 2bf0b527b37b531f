"""Over MPI, for programs that have no optimizer of ours: a reducer."""
