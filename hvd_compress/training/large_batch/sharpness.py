"""Where sharpness-aware minimisation looks for the gradient: SAM and ASAM."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

#: added to norms, which may be zero
TINY = 1e-16


def _norm(arrays: Sequence[np.ndarray]) -> float:
    return float(np.sqrt(sum(float(np.sum(np.square(x, dtype=np.float64))) for x in arrays)))


def is_bias(name: str) -> bool:
    """Return whether a parameter is a bias by its name: "bias", "bias_ih_l0" of an LSTM,
    "in_proj_bias" of attention, "beta" of normalisation in Keras.

    >>> [is_bias(name) for name in ("0.bias", "lstm.bias_hh_l1", "attention.in_proj_bias")]
    [True, True, True]
    >>> [is_bias(name) for name in ("0.weight", "bias.weight", "unbiased")]
    [False, False, False]
    """
    words = re.split(r"[._/]", name.rpartition(".")[2].rpartition("/")[2])
    return not {"bias", "beta"}.isdisjoint(words)


def ascent(gradients: Sequence[np.ndarray], rho: float = 0.05) -> list[np.ndarray]:
    """Return SAM's eps = rho g / ||g||, with the norm over all tensors.

    The step is taken from w, along the gradient at w + eps: where the loss is largest, to first
    order, in a ball of radius rho.

    Reference: Foret, Kleiner, Mobahi and Neyshabur, ICLR 2021, arXiv 2010.01412.
    """
    scale = rho / (_norm(gradients) + TINY)
    return [scale * g for g in gradients]


def adaptive_ascent(
    weights: Sequence[np.ndarray],
    gradients: Sequence[np.ndarray],
    adapts: Sequence[bool],
    rho: float = 0.5,
    eta: float = 0.01,
) -> list[np.ndarray]:
    """Return ASAM's eps = rho T^2 g / ||T g||, with T = |w| + eta for weights and 1 for biases.

    The ball follows the scale of each weight, so that scaling a layer up and the next one down,
    which leaves the function as it is, leaves its sharpness as it is too (for eta = 0).

    Args:
        adapts: whether a tensor is one of weights.

    Reference: Kwon, Kim, Park and Choi, ICML 2021, arXiv 2102.11600.
    """
    sizes = [
        np.abs(w) + eta if a else np.ones_like(w) for w, a in zip(weights, adapts, strict=True)
    ]
    scaled = [t * g for t, g in zip(sizes, gradients, strict=True)]
    scale = rho / (_norm(scaled) + TINY)
    return [scale * t * x for t, x in zip(sizes, scaled, strict=True)]
