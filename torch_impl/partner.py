"""The base class of the optimizers that come with a compression of their own, for PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch


class PartnerOptimizer(torch.optim.Optimizer):
    """An optimizer that knows what its compression returns in the place of gradients."""

    #: the compression that fits
    method: ClassVar[type]
    #: options of the optimizer that the compression has as well
    schedule: ClassVar[tuple[str, ...]]

    def compressor(self, **options: Any) -> Any:
        """Return the compression for this optimizer; ``options`` are those that the optimizer does
        not determine."""
        return self.method(**self.compression_options(self.param_groups[0]), **options)

    def compression_options(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return the options of the compression that a parameter group determines."""
        return {name: group[name] for name in self.schedule}

    def _binding(self) -> Any:
        """Return the binding of the compression that belongs to this optimizer, or ``None`` under
        any other."""
        binding = getattr(self, "compression", None)
        ours = binding is not None and isinstance(binding.method, self.method)
        return binding if ours else None


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Return the loss of the closure that ``step()`` was given, or ``None`` without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
