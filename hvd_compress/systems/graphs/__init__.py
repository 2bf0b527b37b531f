"""Training over a graph: every rank has parameters of its own, and exchanges vectors with its
neighbours only."""

from hvd_compress.systems.base import methods_in
from hvd_compress.systems.graphs.base import DecentralizedMethod, Neighborhood, l1, mix
from hvd_compress.systems.graphs.compressed import LEAD, ChocoSGD, blockwise
from hvd_compress.systems.graphs.diffusion import (
    DGD,
    EXTRA,
    Diffusion,
    ExactDiffusion,
    GradientTracking,
)
from hvd_compress.systems.graphs.matrices import (
    eigenvalues,
    metropolis_hastings,
    second_eigenvalue,
    spectral_gap,
)
from hvd_compress.systems.graphs.topologies import (
    Complete,
    Cycle,
    Edges,
    Grid,
    Line,
    OnePeerExponential,
    Star,
    StaticExponential,
    Topology,
    Torus,
    Weights,
    as_topology,
)
from hvd_compress.systems.ranks import simulate

__all__ = [
    "DGD",
    "EXTRA",
    "LEAD",
    "ChocoSGD",
    "Complete",
    "Cycle",
    "DecentralizedMethod",
    "Diffusion",
    "Edges",
    "ExactDiffusion",
    "GradientTracking",
    "Grid",
    "Line",
    "Neighborhood",
    "OnePeerExponential",
    "Star",
    "StaticExponential",
    "Topology",
    "Torus",
    "Weights",
    "as_topology",
    "blockwise",
    "eigenvalues",
    "l1",
    "metropolis_hastings",
    "mix",
    "second_eigenvalue",
    "simulate",
    "spectral_gap",
]

#: the training methods
METHODS = methods_in(globals())
