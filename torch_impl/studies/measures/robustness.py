"""How much noise, or how large an attack, the weights of a model stand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from hvd_compress.config import is_whole
from hvd_compress.errors import ConfigError
from hvd_compress.studies.measures import bisect


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
    _check(draws=draws)
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
        return bisect(mean_rise, rise, upper, steps, tolerance)


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

    Raises:
        ConfigError: ``restarts`` is not 1 or more.
    """
    _check(restarts=restarts)
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
        return bisect(worst_rise, rise, upper, steps, tolerance)


@contextlib.contextmanager
def _kept(weights: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """In this context weights may be disturbed in place; behind it they are what they were."""
    kept = [w.detach().clone() for w in weights]
    with torch.no_grad():
        try:
            yield kept
        finally:
            for w, before in zip(weights, kept, strict=True):
                w.copy_(before)


def _check(**options: int) -> None:
    for option, value in options.items():
        if not is_whole(value) or value < 1:
            raise ConfigError(f"{option} must be 1 or more; got {value!r}")
