"""The gradient noise scale of a distributed training, for PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hvd_compress.config import is_whole
from hvd_compress.errors import ConfigError
from hvd_compress.methods import BF16, FP16, NoCompression
from hvd_compress.studies.noise_scale import NoiseScale


class GradientNoiseScale(NoiseScale):
    """Measures B_simple, the batch size beyond which larger batches save few steps, from the
    gradients that training computes anyway: those of each rank, and their average::

        optimizer = hvd.DistributedOptimizer(optimizer)
        noise = GradientNoiseScale(
            optimizer, batch_size=32, average=hvd.allreduce, ranks=hvd.size()
        )
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            noise.measure()
        print(noise.value)

    ``measure()`` sends one number.  It wants averages of whole gradients, which compression that
    loses something does not hand out: measure some hundred steps without.  Gradients must not be
    changed before it, by clipping or by a loss scale.

    Args:
        optimizer: distributed already, with ``op=hvd.Average``.
        batch_size: examples of one backward pass on one rank.
        average: averages a tensor over the ranks, given its ``name``: ``hvd.allreduce``.
        ranks: how many they are: ``hvd.size()``.
        decay: of the moving averages over steps, in [0, 1).

    Raises:
        ConfigError: an option makes no sense.

    Reference: McCandlish et al., 2018, arXiv 1812.06162, appendix A.1.

    On one rank two backward passes of 8 examples each make up the larger batch:

    >>> import torch
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> noise = GradientNoiseScale(sgd, batch_size=8, average=lambda x, name: x, ranks=1)
    >>> for gradient in (1.0, 3.0):
    ...     (gradient * model.weight).sum().backward()
    >>> noise.measure()
    >>> noise.variance, noise.squared  # (5 - 4) / (1/8 - 1/16) and 2 * 4 - 5
    (16.0, 3.0)
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        batch_size: int,
        average: Callable[..., torch.Tensor],
        ranks: int,
        decay: float = 0.99,
    ) -> None:
        super().__init__(decay)
        for option, value in {"batch_size": batch_size, "ranks": ranks}.items():
            if not is_whole(value) or value < 1:
                raise ConfigError(f"{option} must be a whole number, 1 or more; got {value!r}")
        binding: Any = getattr(optimizer, "compression", None)
        if binding is not None and binding.sums:
            raise ConfigError("the noise scale needs averages: op=hvd.Average")
        method = NoCompression() if binding is None else binding.method
        if not isinstance(method, NoCompression | FP16 | BF16):
            raise ConfigError(
                f"{method.name} does not hand out whole gradients: measure the noise scale with "
                "compression=hvd.NoCompression, FP16 or BF16"
            )
        self._batch_size, self._average, self._ranks = batch_size, average, ranks
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._squares: dict[int, list[torch.Tensor]] = {}
        # Before a gradient is added to p.grad, where the exchange may overwrite it.
        self._hooks = [
            p.register_hook(lambda g, i=i: self._see(i, g))
            for i, p in enumerate(self._parameters)
            if p.requires_grad
        ]

    def _see(self, index: int, gradient: torch.Tensor) -> None:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        square = torch.linalg.vector_norm(values.detach(), dtype=torch.float64).square()
        self._squares.setdefault(index, []).append(square)

    def measure(self) -> None:
        """Take the step in whose gradients are in ``p.grad``: after ``optimizer.step()``, before
        ``zero_grad()``.  A collective."""
        squares = list(self._squares.values())
        passes = max(map(len, squares), default=1)
        self._squares.clear()
        # What no pass reached adds nothing.
        own = sum(float(torch.stack(each).sum()) for each in squares) / passes
        mine = torch.tensor([own], dtype=torch.float64)
        # A name of its own: ranks may have called nameless collectives in other numbers.
        small = float(self._average(mine, name="hvd_compress.noise_scale"))
        norms = [_squared(p.grad) for p in self._parameters if p.grad is not None]
        large = sum(norms) / passes**2  # passes were added up
        self.update(
            small,
            large,
            small=self._batch_size,
            large=self._batch_size * passes * self._ranks,
        )

    def close(self) -> None:
        """Measure no longer: remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._squares.clear()


def _squared(gradient: torch.Tensor) -> float:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
