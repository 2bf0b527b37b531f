"""Measures of generalisation of PyTorch models::

    from hvd_compress.torch.studies.measures import take_all

    found = take_all(model, initial_model, x, y)  # by the names of the paper's tables

Formulas and rank statistics are in ``hvd_compress.studies.measures``.  Weights are those of layers:
batch normalisation is folded into the layer before it, and biases do not count.  Nothing here is a
collective: ranks may measure a model each.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from hvd_compress.config import is_whole
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.studies import measures as formulas

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


def take_all(
    model: nn.Module,
    initial: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    seed: int = 0,
    **search: Any,
) -> dict[str, float]:
    """Return the measures of a classifier by the names of the paper's tables; all are larger where
    a larger gap is expected.

    Bounds and norms v are sqrt(v / m); ``spectral-orig`` is a logarithm.

    Args:
        model: trained; it is not changed.
        initial: a copy of it from before training.
        x, y: what it was trained on: inputs of shape (m, ...), labels of shape (m,).
        seed: of the noise.
        search: ``rise``, ``eps``, ``steps``, ``upper`` and ``tolerance`` of :func:`noise_scale`.

    Raises:
        UnsupportedError: a batch normalisation cannot be folded.
    """
    net, start = folded(model), folded(initial)
    named, m = weights_of(net), len(x)
    weights = list(named.values())
    with torch.no_grad():
        logits = net(x)
        w = torch.cat([p.flatten() for p in weights]).double()
        w0 = torch.cat([p.flatten() for p in weights_of(start).values()]).double()
        frobenius = [p.square().sum().item() for p in weights]
        gamma = torch.quantile(margins(logits, y), 0.1).item()
        path = path_norm(net, x)
    distances, omega = (w - w0).numpy(force=True), w.numel()
    norm, moved = w.square().sum().item(), (w - w0).square().sum().item()

    @torch.no_grad()
    def error() -> float:
        return (net(x).argmax(1) != y).double().mean().item()

    def loss() -> torch.Tensor:
        return functional.cross_entropy(net(x), y)

    options = {"seed": seed, **search}
    sigma, sigma_mag = (noise_scale(weights, error, relative=r, **options) for r in (False, True))
    alpha, alpha_mag = (
        adversarial_radius(weights, error, loss, relative=r, **options) for r in (False, True)
    )
    eps = search.get("eps", 1e-3)
    spectral = spectral_norms(named)
    values = {
        "vc-dim": formulas.vc_dimension(omega, len(weights)),
        "params": float(omega),
        "1/margin": formulas.flatness(gamma or 1e-12),
        "param-norm": norm,
        "frob-distance": moved,
        "path-norm": path,
        "fisher-rao": fisher_rao(net, x, y),
        "pacbayes-init": formulas.pac_bayes_bound(moved, sigma, m),
        "pacbayes-orig": formulas.pac_bayes_bound(norm, sigma, m),
        "pacbayes-flatness": formulas.flatness(sigma),
        "sharpness-init": formulas.sharpness_bound(moved, alpha, sigma, m, omega),
        "sharpness-orig": formulas.sharpness_bound(norm, alpha, sigma, m, omega),
        "sharpness-flatness": formulas.flatness(alpha),
        "pacbayes-mag-init": formulas.magnitude_aware_bound(moved, distances, sigma_mag, m, eps),
        "pacbayes-mag-orig": formulas.magnitude_aware_bound(norm, distances, sigma_mag, m, eps),
        "1/sigma' pacbayes-mag": formulas.flatness(sigma_mag),
        "1/alpha' sharpness-mag": formulas.flatness(alpha_mag),
    }
    return {
        **{name: formulas.reported(value, m) for name, value in values.items()},
        "entropy": entropy(logits),
        "cross-entropy": functional.cross_entropy(logits, y).item(),
        "spectral-orig": formulas.spectral_bound(spectral, frobenius, gamma or 1e-12),
    }


def folded(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` in evaluation mode that computes the same, without batch
    normalisation.

    Raises:
        UnsupportedError: a batch normalisation does not stand after a convolution or a linear
            layer of the same ``Sequential``.
    """
    model = copy.deepcopy(model).eval()
    for container in model.modules():
        if not isinstance(container, nn.Sequential):
            continue
        for i in range(len(container) - 1):
            layer, norm = container[i], container[i + 1]
            if not isinstance(norm, _BatchNorm):
                continue
            if isinstance(layer, nn.Linear):
                container[i], container[i + 1] = fuse_linear_bn_eval(layer, norm), nn.Identity()
            elif isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
                container[i], container[i + 1] = fuse_conv_bn_eval(layer, norm), nn.Identity()
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            raise UnsupportedError(
                f"{name} cannot be folded: put it right after its layer, in the same nn.Sequential"
            )
    return model


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of ``model`` by name: parameters of two dimensions or more, which leaves
    out biases."""
    return {name: p for name, p in model.named_parameters() if p.ndim > 1}


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


def noise_scale(
    weights: Sequence[torch.Tensor],
    risk: Callable[[], float],
    *,
    rise: float = 0.1,
    relative: bool = False,
    eps: float = 1e-3,
    draws: int = 10,
    steps: int = 15,
    upper: float = 2.0,
    tolerance: float = 0.01,
    seed: int = 0,
) -> float:
    """Return sigma: the largest scale of Gaussian noise in the weights at which the risk rises by
    ``rise`` on average.

    Args:
        weights: that are disturbed, in place; they are what they were afterwards, bit for bit.
        risk: evaluates the model with the weights as they are, for instance its training error.
        rise: how much the risk may rise, in its units.
        relative: for sigma', the deviation of u_i is sqrt(sigma'^2 w_i^2 + eps^2).
        eps: see there.
        draws: of noise, the same ones at every scale.
        steps, upper, tolerance: of the bisection: how often it halves, the largest scale that it
            looks at, and how near to ``rise`` it stops.
        seed: of the noise.

    Raises:
        ConfigError: ``draws`` is not 1 or more.

    Differs from public code in: sigma is the standard deviation, where that passes its square.
    """
    if not is_whole(draws) or draws < 1:
        raise ConfigError(f"draws must be 1 or more; got {draws!r}")
    clean = risk()

    def mean_rise(sigma: float) -> float:
        generator = torch.Generator(weights[0].device).manual_seed(seed)
        total = 0.0
        for _ in range(draws):
            for w, before in zip(weights, kept, strict=True):
                size = (sigma**2 * before.square() + eps**2).sqrt() if relative else sigma
                noise = torch.randn(w.shape, generator=generator, dtype=w.dtype, device=w.device)
                w.copy_(before + size * noise)
            total += risk() - clean
        return total / draws

    with _kept(weights) as kept:
        return formulas.bisect(mean_rise, rise, upper, steps, tolerance)


def adversarial_radius(
    weights: Sequence[torch.Tensor],
    risk: Callable[[], float],
    loss: Callable[[], torch.Tensor],
    *,
    rise: float = 0.1,
    relative: bool = False,
    eps: float = 1e-3,
    restarts: int = 2,
    ascents: int = 10,
    steps: int = 15,
    upper: float = 2.0,
    tolerance: float = 0.01,
    seed: int = 0,
) -> float:
    """Return alpha: the largest radius such that no step of the weights in it raises the risk by
    more than ``rise``.

    The worst step is looked for by gradient ascent along signs, projected to the box, from random
    corners: at a minimum the gradient says nothing.  So alpha is an upper estimate.

    Args:
        weights, risk, rise, steps, upper, tolerance: as for :func:`noise_scale`.
        loss: differentiable; its gradient shows the way.
        relative: for alpha', |u_i| <= alpha' |w_i| + eps, else |u_i| <= alpha.
        restarts: corners to begin at.
        ascents: steps of gradient ascent, each half as long as the radius.
        seed: of the corners.
    """
    if not is_whole(restarts) or restarts < 1:
        raise ConfigError(f"restarts must be 1 or more; got {restarts!r}")
    clean = risk()

    def worst_rise(alpha: float) -> float:
        generator = torch.Generator(weights[0].device).manual_seed(seed)
        sizes = [alpha * w.abs() + eps if relative else torch.full_like(w, alpha) for w in kept]
        worst = 0.0
        for _ in range(restarts):
            for w, before, size in zip(weights, kept, sizes, strict=True):
                corner = torch.randint(0, 2, w.shape, generator=generator, device=w.device)
                w.copy_(before + size * (2 * corner - 1))
            worst = max(worst, risk() - clean)
            for _ in range(ascents):
                if worst > rise:  # all that is asked
                    return worst
                with torch.enable_grad():
                    found = torch.autograd.grad(loss(), list(weights), allow_unused=True)
                for w, g, before, size in zip(weights, found, kept, sizes, strict=True):
                    if g is not None:
                        step = (w - before + 0.5 * size * g.sign()).clamp(-size, size)
                        w.copy_(before + step)
                worst = max(worst, risk() - clean)
        return worst

    with _kept(weights) as kept:
        return formulas.bisect(worst_rise, rise, upper, steps, tolerance)


@contextlib.contextmanager
def _kept(weights: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """In this context weights may be disturbed in place; after it they are what they were."""
    kept = [w.detach().clone() for w in weights]
    with torch.no_grad():
        try:
            yield kept
        finally:
            for w, before in zip(weights, kept, strict=True):
                w.copy_(before)
