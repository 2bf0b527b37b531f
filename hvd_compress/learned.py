"""LGC, whose autoencoder the ranks train on their gradients and then send latents of.

A network is a module with the functions of :mod:`hvd_compress.methods.lgc_numpy_network`; each
framework has its own.  All weights are one flat array that begins alike everywhere, so that
frameworks can be compared, and checkpoints loaded by another one.
"""

from hvd_compress.methods.lgc import LGC
from hvd_compress.methods.lgc_aggregators import learned_allreduce, learned_server

__all__ = ["LGC", "learned_allreduce", "learned_server"]
