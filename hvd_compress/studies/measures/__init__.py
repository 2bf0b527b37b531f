"""Measures of generalisation: formulas and rank statistics, in NumPy.

After Jiang, Neyshabur, Mobahi, Krishnan and Bengio, "Fantastic generalization measures and where to
find them", 2019, arXiv 1912.02178, whose numbers of equations the formulas have.
``hvd_compress.torch.studies.measures`` takes them of models.
"""

from .baselines import canonical_ordering, noisy_oracle, random_measure, vc_dimension
from .bounds import (
    flatness,
    magnitude_aware_bound,
    pac_bayes_bound,
    reported,
    sharpness_bound,
    spectral_bound,
)
from .scores import Scores, scores
from .search import bisect
from .statistics import (
    conditional_information,
    granulated,
    kendall_tau,
    least_information,
    mean_psi,
)

__all__ = [
    "Scores",
    "bisect",
    "canonical_ordering",
    "conditional_information",
    "flatness",
    "granulated",
    "kendall_tau",
    "least_information",
    "magnitude_aware_bound",
    "mean_psi",
    "noisy_oracle",
    "pac_bayes_bound",
    "random_measure",
    "reported",
    "scores",
    "sharpness_bound",
    "spectral_bound",
    "vc_dimension",
]
