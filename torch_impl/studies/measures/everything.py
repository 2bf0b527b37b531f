"""All measures of a model at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hvd_compress.studies import measures as formulas

from .folding import folded, weights_of
from .functions import entropy, fisher_rao, margins, path_norm, spectral_norms
from .robustness import adversarial_radius, noise_scale


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
