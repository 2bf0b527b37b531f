"""A parameter server over MPI."""
