"""Training with local steps between exchanges, for PyTorch; the methods themselves are in
:mod:`hvd_compress.systems.rounds`."""
