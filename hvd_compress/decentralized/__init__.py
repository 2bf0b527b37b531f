"""Training over a graph: every rank has parameters of its own, and exchanges vectors with its
neighbours only."""

from hvd_compress.decentralized.base import DecentralizedMethod, Network, mix
from hvd_compress.decentralized.choco import ChocoSGD
from hvd_compress.decentralized.diffusion import DGD, CTADiffusion, Diffusion
from hvd_compress.decentralized.exact_diffusion import NIDS, ExactDiffusion
from hvd_compress.decentralized.extra import EXTRA
from hvd_compress.decentralized.lead import LEAD, blockwise
from hvd_compress.decentralized.matrices import (
    eigenvalues,
    lazy,
    metropolis_hastings,
    second_eigenvalue,
    spectral_gap,
)
from hvd_compress.decentralized.proximal import box, elastic_net, l1, l2
from hvd_compress.decentralized.simulation import simulate, train
from hvd_compress.decentralized.topologies import (
    Complete,
    Cycle,
    Edges,
    ErdosRenyi,
    Grid,
    Line,
    OnePeerExponential,
    Star,
    StaticExponential,
    Topology,
    Torus,
    Weights,
    as_topology,
    edges_from_file,
)
from hvd_compress.decentralized.tracking import GradientTracking, PushDIGing

__all__ = [
    "DGD",
    "EXTRA",
    "LEAD",
    "NIDS",
    "CTADiffusion",
    "ChocoSGD",
    "Complete",
    "Cycle",
    "DecentralizedMethod",
    "Diffusion",
    "Edges",
    "ErdosRenyi",
    "ExactDiffusion",
    "GradientTracking",
    "Grid",
    "Line",
    "Network",
    "OnePeerExponential",
    "PushDIGing",
    "Star",
    "StaticExponential",
    "Topology",
    "Torus",
    "Weights",
    "as_topology",
    "blockwise",
    "box",
    "edges_from_file",
    "eigenvalues",
    "elastic_net",
    "l1",
    "l2",
    "lazy",
    "metropolis_hastings",
    "mix",
    "second_eigenvalue",
    "simulate",
    "spectral_gap",
    "train",
]
