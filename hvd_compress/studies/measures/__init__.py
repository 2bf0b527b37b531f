"""Measures of generalisation: formulas and rank statistics, in NumPy.

After Jiang, Neyshabur, Mobahi, Krishnan and Bengio, "Fantastic generalization measures and where to
find them", 2019, arXiv 1912.02178, whose numbers of equations the formulas have.
``hvd_compress.torch.studies.measures`` takes them of models.
"""

from .formulas import (
    bisect,
    flatness,
    magnitude_aware_bound,
    pac_bayes_bound,
    reported,
    sharpness_bound,
    spectral_bound,
    vc_dimension,
)
from .statistics import Scores, conditional_information, granulated, kendall_tau, scores

__all__ = [
    "Scores",
    "bisect",
    "conditional_information",
    "flatness",
    "granulated",
    "kendall_tau",
    "magnitude_aware_bound",
    "pac_bayes_bound",
    "reported",
    "scores",
    "sharpness_bound",
    "spectral_bound",
    "vc_dimension",
]
