"""Parameter servers over MPI."""
