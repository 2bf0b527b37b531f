"""SAM for PyTorch; its formula: ``hvd_compress/optimizers/sharpness.py``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from hvd_compress import optimizers
from hvd_compress.errors import ConfigError
from hvd_compress.optimizers.sharpness import averaged, option

from ..eager import run_eagerly
from ..parameters import check_model

Average = Callable[..., torch.Tensor]


class SAM:
    """Sharpness-aware minimisation: steps along the gradient at w + eps, where the loss is larger::

        sam = hvd.SAM(model, rho=0.05)  # next to any optimizer, instead of loss.backward()
        for x, y in loader:
            optimizer.zero_grad()
            loss = sam.backward(lambda: criterion(model(x), y))
            optimizer.step()

    The loss is evaluated twice.  The first gradient, of this rank alone ("m-sharpness"), gives eps
    = rho g / |g|; the second one is exchanged.  Weights return to what they were, bit for bit.

    Args:
        model: the module that is trained; batch normalisation has the statistics of the first pass.
        rho: radius of the ball in which the worst weights are looked for, 0 or more.
        average: ``hvd.allreduce``, called with a tensor and its ``name``, for the same eps on all
            ranks, at the cost of another dense gradient.

    Reference: Foret, Kleiner, Mobahi and Neyshabur, ICLR 2021, arXiv 2010.01412.

    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> weight = torch.nn.init.ones_(model.weight)
    >>> loss = hvd.SAM(model, rho=0.5).backward(lambda: model.weight.square().sum())
    >>> loss.item(), weight.item(), weight.grad.item()  # the gradient is that at 1 + 0.5
    (1.0, 1.0, 3.0)
    """

    rho = option("rho")

    def __init__(
        self, model: torch.nn.Module, rho: float = 0.05, average: Average | None = None
    ) -> None:
        self.formula = optimizers.SAM(rho)
        check_model(model)
        if average is not None and not callable(average):
            raise ConfigError("average must be a function of a tensor: average=hvd.allreduce")
        self.model, self.average = model, average
        run_eagerly(type(self), "backward")

    def backward(self, loss_of: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Add the gradient at w + eps to ``p.grad`` of all parameters.

        Args:
            loss_of: computes the loss from scratch, from the same examples each time.  It may
                multiply it by a loss scale, on which eps does not depend.

        Returns:
            The loss at w, detached.
        """
        if not callable(loss_of):
            raise ConfigError(f"loss_of must be a function without arguments; got {loss_of!r}")
        weights = [p for p in self.model.parameters() if p.requires_grad]
        with torch.enable_grad():
            if not isinstance(loss := loss_of(), torch.Tensor):
                raise ConfigError(f"loss_of must return the loss, a tensor; got {loss!r}")
            # Unlike backward() this tells no hook, so nothing is exchanged.
            found = torch.autograd.grad(loss, weights, allow_unused=True)
        first = [g.to_dense() if g is not None and g.is_sparse else g for g in found]
        kept = [p.detach().clone() for p in weights]
        statistics = [
            (buffer, buffer.clone())
            for module in self.model.modules()
            if getattr(module, "track_running_stats", False)
            for buffer in module.buffers(recurse=False)
        ]
        try:
            self._climb(weights, first)
            torch.clear_autocast_cache()  # of weights in half precision
            with torch.enable_grad():
                loss_of().backward()
        finally:
            with torch.no_grad():
                for p, w in zip(weights, kept, strict=True):
                    p.copy_(w)
                for buffer, before in statistics:
                    buffer.copy_(before)
            torch.clear_autocast_cache()
        return loss.detach()

    @torch.no_grad()
    def _climb(
        self, weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Add eps to the weights."""
        if self.average is not None:
            # A name of its own: ranks may have called nameless collectives in other numbers.
            average = functools.partial(self.average, name="hvd_compress.sharpness")
            gradients = averaged(weights, gradients, average)
        for p, eps in zip(weights, self.formula.ascent(weights, gradients), strict=True):
            if eps is not None:
                p.add_(eps)
