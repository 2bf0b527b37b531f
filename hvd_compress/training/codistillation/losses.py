"""The distillation losses, in NumPy: the reference of those in the frameworks.

With z this model's outputs, q = softmax(z), and the outputs of teachers j = 1 ... n:

==================  ================================  =============================================
name                what is averaged over teachers    loss of an example
==================  ================================  =============================================
``cross_entropy``   p = mean of softmax(z_j)          - sum p log q
``kl``              p = mean of softmax(z_j)          KL(p || q) = sum p (log p - log q)
``reverse_kl``      l = mean of log softmax(z_j)      sum q (log q - l), the mean of KL(q || p_j)
``mse``             t = mean of z_j                   mean of (z - t)^2 over the outputs
==================  ================================  =============================================

and the mean over examples.  The first two have the same gradient; so have the average of a loss
over the teachers and, up to a constant, the loss to the average as it is taken here.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.base import Array


class Loss(NamedTuple):
    """``view`` of a teacher's outputs is averaged; ``distance`` to the average is minimised."""

    view: Callable[[Any], Any]
    distance: Callable[[Any, Any], Any]


def log_softmax(z: np.ndarray) -> np.ndarray:
    """Over the last dimension."""
    shifted = z - z.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def softmax(z: np.ndarray) -> np.ndarray:
    return np.exp(log_softmax(z))


def _cross_entropy(z: np.ndarray, p: np.ndarray) -> float:
    return float(-(p * log_softmax(z)).sum(-1).mean())


def _kl(z: np.ndarray, p: np.ndarray) -> float:
    log_p = np.log(np.where(p > 0, p, 1))  # 0 log 0 = 0
    return float((p * (log_p - log_softmax(z))).sum(-1).mean())


def _reverse_kl(z: np.ndarray, mean_log_p: np.ndarray) -> float:
    log_q = log_softmax(z)
    return float((np.exp(log_q) * (log_q - mean_log_p)).sum(-1).mean())


def _mse(z: np.ndarray, mean: np.ndarray) -> float:
    return float(((z - mean) ** 2).mean())


#: by name; classes are the last dimension
LOSSES = {
    "cross_entropy": Loss(softmax, _cross_entropy),
    "kl": Loss(softmax, _kl),
    "reverse_kl": Loss(log_softmax, _reverse_kl),
    "mse": Loss(lambda z: z, _mse),
}


def target(view: Callable[[Array], Array], outputs: Sequence[Array]) -> Array:
    """Return the average over the teachers, added up in their order."""
    return functools.reduce(operator.add, map(view, outputs)) / len(outputs)
