"""Measures of generalisation of PyTorch models::

    from ..measures import take_all

    found = take_all(model, initial_model, x, y)  # by the names of the paper's tables

Formulas and rank statistics are in ``hvd_compress.studies.measures``.  Weights are those of layers:
batch normalisation is folded into the layer before it, and biases do not count.  Nothing here is a
collective: ranks may measure a model each.
"""

from .everything import take_all
from .folding import folded, weights_of
from .functions import entropy, fisher_rao, margins, path_norm, spectral_norms
from .robustness import adversarial_radius, noise_scale

__all__ = [
    "adversarial_radius",
    "entropy",
    "fisher_rao",
    "folded",
    "margins",
    "noise_scale",
    "path_norm",
    "spectral_norms",
    "take_all",
    "weights_of",
]
