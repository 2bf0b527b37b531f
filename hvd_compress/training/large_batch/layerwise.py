"""Steps in proportion to the norm of each layer's weights: LARS and LAMB.

Large batches allow large learning rates, and then a layer whose gradient is large beside its
weights diverges first.  Both methods make the step of a layer as long as a fraction of its weights.
"""

from __future__ import annotations

import numpy as np


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x))


def lars_step(
    w: np.ndarray,
    g: np.ndarray,
    v: np.ndarray,
    *,
    lr: float,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    trust: float = 0.001,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the new weights and velocity of a layer after one step of LARS::

        l = trust ||w|| / (||g|| + wd ||w||)          1 if either norm is 0
        v = m v + lr l (g + wd w);   w = w - v

    Reference: You, Gitman and Ginsburg, "Large batch training of convolutional networks", 2017,
    arXiv 1708.03888.  Optimizers leave tensors of one dimension, biases and the like, to plain
    SGD: l = 1, wd = 0.
    """
    norm_w, norm_g = _norm(w), _norm(g)
    rate = trust * norm_w / (norm_g + weight_decay * norm_w) if norm_w and norm_g else 1.0
    v = momentum * v + lr * rate * (g + weight_decay * w)
    return w - v, v


def lamb_step(
    w: np.ndarray,
    g: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    step: int,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the new weights and moments of a layer after one step of LAMB::

        m = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g^2
        u = m^ / (sqrt(v^) + eps) + wd w
        w = w - lr (||w|| / ||u||) u                  the quotient is 1 if either norm is 0

    Args:
        step: number of this step, from 1, for the bias correction of m^ and v^.

    Reference: You et al., "Large batch optimization for deep learning: training BERT in 76
    minutes", ICLR 2020, arXiv 1904.00962, with phi(x) = x.
    """
    beta1, beta2 = betas
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    u = m / (1 - beta1**step) / (np.sqrt(v / (1 - beta2**step)) + eps) + weight_decay * w
    norm_w, norm_u = _norm(w), _norm(u)
    ratio = norm_w / norm_u if norm_w and norm_u else 1.0
    return w - lr * ratio * u, m, v
