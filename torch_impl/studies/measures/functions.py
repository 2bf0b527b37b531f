"""Measures of what a model computes, and norms of its layers."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional

from .folding import weights_of


def margins(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return how far the right class is above the best wrong one, (n,).

    Args:
        logits: floats, (n, classes).
        labels: int64, (n,).
    """
    right = logits.gather(1, labels[:, None]).squeeze(1)
    wrong = logits.scatter(1, labels[:, None], -torch.inf).amax(1)
    return right - wrong


def entropy(logits: torch.Tensor) -> float:
    """Return the mean entropy of the outputs' softmax, in nats.

    Args:
        logits: floats, (n, classes).
    """
    log_p = functional.log_softmax(logits, 1)
    return -(log_p.exp() * log_p).sum(1).mean().item()


@torch.no_grad()
def path_norm(model: nn.Module, x: torch.Tensor) -> float:
    """Return (44): the sum of the outputs for an input of ones, with squared weights, no biases.

    Args:
        model: without batch normalisation.
        x: of which only the shape of an example matters.
    """
    squared = copy.deepcopy(model)
    weights = {id(w) for w in weights_of(squared).values()}
    for p in squared.parameters():
        p.copy_(p.square() if id(p) in weights else torch.zeros_like(p))
    return squared(torch.ones_like(x[:1])).sum().item()


@torch.no_grad()
def spectral_norms(weights: dict[str, torch.Tensor]) -> list[float]:
    """Return the largest singular value of each layer's weights, as matrices (outputs, all else).

    For convolutions that is the norm of the kernel, not of the map between images.

    Args:
        weights: by name, as ``weights_of`` returns them.
    """
    return [torch.linalg.matrix_norm(w.flatten(1), 2).item() for w in weights.values()]


def fisher_rao(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Return (45), the square of the Fisher-Rao norm: the mean of <w, gradient of an example's
    loss>^2.

    Networks of ReLUs without biases have it as depth^2 <f, dl/df>^2 (Liang et al., 2019).

    Args:
        model: a classifier; it is not changed.
        x, y: inputs (n, ...) and labels (n,), int64.
    """
    weights = {name: w.detach() for name, w in weights_of(model).items()}
    scale = torch.ones((), requires_grad=True)
    scaled = {name: scale * w for name, w in weights.items()}
    logits = torch.func.functional_call(model, scaled, (x,))
    losses = functional.cross_entropy(logits, y, reduction="none")
    # <w, gradient> is the derivative by the scale; a second backward pass gives that of each loss.
    each = torch.ones_like(losses, requires_grad=True)
    [total] = torch.autograd.grad((each * losses).sum(), scale, create_graph=True)
    [along] = torch.autograd.grad(total, each)
    return along.square().mean().item()
