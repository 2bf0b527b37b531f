"""DeMo, the optimizer (Peng et al., 2024, arXiv 2411.19870); its messages: ``methods/demo.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from hvd_compress.errors import ConfigError
from hvd_compress.methods.demo import DeMoCompression

from .partner import PartnerOptimizer, loss_of


class DeMo(PartnerOptimizer):
    """Steps along the sign of what is large and slow in the momenta of all ranks::

        demo = hvd.DeMo(model.parameters(), lr=1e-3)
        optimizer = hvd.DistributedOptimizer(
            demo, named_parameters=model.named_parameters(), compression=demo.compressor()
        )

        p = p (1 - lr weight_decay) - lr sign(q)

    Momentum lives in the compression, one on each rank, which returns sign(q) in place of the
    gradient; see :class:`~hvd_compress.DeMoCompression`.  So the optimizer takes no step without
    it, but does on a single rank.  Every weight moves by the whole learning rate in every step, so
    it should be about that of Adam, and fall towards the end.

    No state but the compression's ``momentum``, which differs between ranks.

    Args:
        params: as for every optimizer; a group may have its own ``lr`` and ``weight_decay``.
        lr: length of the step of each weight.
        decay: of momentum.
        chunk: the longest side of the chunks that the cosine transform is made of.
        top_k: coefficients that a rank sends of each chunk.
        sign: False steps along q, whose magnitude is about that of momentum.
        weight_decay: decoupled from the gradient, as in AdamW.

    Raises:
        ConfigError: an option makes no sense; a step with another compression, or with sparse
            gradients.

    Differs from the released code in: see :class:`~hvd_compress.DeMoCompression`.
    """

    method = DeMoCompression
    schedule = ("decay", "chunk", "top_k", "sign")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        decay: float = 0.999,
        chunk: int = 64,
        top_k: int = 32,
        sign: bool = True,
        weight_decay: float = 0.0,
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ConfigError(f"{name} must be 0 or more; got {value!r}")
        options = {
            **{"lr": lr, "decay": decay, "chunk": chunk, "top_k": top_k, "sign": sign},
            "weight_decay": weight_decay,
        }
        self.method(**self.compression_options(options))  # checks the rest
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step along the directions that came in place of gradients."""
        loss = loss_of(closure)
        binding = self._binding()
        if binding is None:
            raise ConfigError(NO_MOMENTUM)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p in binding.sparse:
                    raise ConfigError(NO_ROWS)
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(p.grad, alpha=-group["lr"])
        return loss


NO_MOMENTUM = (
    "DeMo has its momentum in its compression, and takes no step without it: write demo = "
    "hvd.DeMo(...) and hvd.DistributedOptimizer(demo, compression=demo.compressor())"
)
NO_ROWS = (
    "DeMo transforms whole tensors, and sparse gradients have no momentum: pass "
    "sparse_as_dense=True to hvd.DistributedOptimizer"
)
