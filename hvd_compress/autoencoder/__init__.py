"""The autoencoder of LGC: its shape, and the network in NumPy; each framework has its own.

A network is a module with the functions of :class:`Network`; :func:`network_of` finds the one for
arrays of a kind.  All weights are one flat array that begins alike everywhere, so that frameworks
can be compared, and checkpoints loaded by another one.
"""

from hvd_compress.autoencoder import numpy_network
from hvd_compress.autoencoder.layout import (
    DECODER,
    ENCODER,
    LEAST,
    SLOPE,
    Layer,
    Network,
    first_weights,
    latent_size,
    lengths,
    stretched,
    unpacked,
)
from hvd_compress.autoencoder.networks import network_of

__all__ = [
    "DECODER",
    "ENCODER",
    "LEAST",
    "SLOPE",
    "Layer",
    "Network",
    "first_weights",
    "latent_size",
    "lengths",
    "network_of",
    "numpy_network",
    "stretched",
    "unpacked",
]
