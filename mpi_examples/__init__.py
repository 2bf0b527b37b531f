"""Examples, each a program: ``python -m mpi_examples.train_digits``."""
