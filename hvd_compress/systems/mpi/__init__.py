"""Over MPI: servers, and a reducer for programs that have no optimizer of ours."""
