"""Training over a graph: every rank has parameters of its own, and exchanges vectors with its
neighbours only."""

from hvd_compress.systems.base import methods_in
from hvd_compress.systems.decentralized import DecentralizedMethod, l1, mix
from hvd_compress.systems.diffusion import DGD, EXTRA, Diffusion, ExactDiffusion, GradientTracking
from hvd_compress.systems.lead import LEAD
from hvd_compress.systems.ranks import simulate
from hvd_compress.systems.topologies import (
    Edges,
    Graph,
    Neighborhood,
    Topology,
    Weights,
    as_topology,
    eigenvalues,
    second_eigenvalue,
    spectral_gap,
)

__all__ = [
    "DGD",
    "EXTRA",
    "LEAD",
    "DecentralizedMethod",
    "Diffusion",
    "Edges",
    "ExactDiffusion",
    "GradientTracking",
    "Graph",
    "Neighborhood",
    "Topology",
    "Weights",
    "as_topology",
    "eigenvalues",
    "l1",
    "mix",
    "second_eigenvalue",
    "simulate",
    "spectral_gap",
]

#: the training methods
METHODS = methods_in(globals())
