"""The distillation losses, of the arrays of any framework.

With z this model's outputs, q = softmax(z), and the outputs of teachers j = 1 ... n:

==================  ================================  =============================================
name                what is averaged over teachers    loss of an example
==================  ================================  =============================================
``kl``              p = mean of softmax(z_j)          KL(p || q) = sum p (log p - log q)
``mse``             t = mean of z_j                   mean of (z - t)^2 over the outputs
==================  ================================  =============================================

and the mean over examples.  Up to a constant, the loss to
the average has the gradient of the averaged losses, too.
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


class Functions(NamedTuple):
    """The array primitives that losses are written over.

    Attributes:
        log_softmax: over the classes.
        exp, log: of each element; the logarithm of 0 is some finite number.
        sums: of each example over the classes, and their mean over the examples.
        mean: of all elements.
    """

    log_softmax: Callable[[Any], Any]
    exp: Callable[[Any], Any]
    log: Callable[[Any], Any]
    sums: Callable[[Any], Any]
    mean: Callable[[Any], Any]


def losses_over(f: Functions) -> dict[str, Loss]:
    """Return all losses by name."""

    def softmax(z: Any) -> Any:
        return f.exp(f.log_softmax(z))

    return {
        "kl": Loss(softmax, lambda z, p: f.sums(p * (f.log(p) - f.log_softmax(z)))),
        "mse": Loss(lambda z: z, lambda z, mean: f.mean((z - mean) ** 2)),
    }


def log_softmax(z: np.ndarray) -> np.ndarray:
    """Over the last dimension."""
    shifted = z - z.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


#: of NumPy's arrays; classes are the last dimension
LOSSES = losses_over(
    Functions(
        log_softmax,
        np.exp,
        log=lambda p: np.log(np.where(p > 0, p, 1)),
        sums=lambda x: float(x.sum(-1).mean()),
        mean=lambda x: float(x.mean()),
    )
)


def target(view: Callable[[Array], Array], outputs: Sequence[Array]) -> Array:
    """Return the average over the teachers, added up in their order."""
    return functools.reduce(operator.add, map(view, outputs)) / len(outputs)
