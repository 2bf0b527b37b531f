"""LARS, LAMB and DeMo for PyTorch."""

from __future__ import annotations

from hvd_compress import optimizers
from hvd_compress.errors import ConfigError
from hvd_compress.optimizers.demo import NO_MOMENTUM, NO_ROWS

from ..state.optimizer_host import FormulaOptimizer, PartnerOptimizer


class LARS(FormulaOptimizer):
    """LARS, whose momentum stays with it under a compression that takes momentum over, as DGC does:

    >>> w = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
    >>> lars = hvd.LARS([w], lr=3.2)
    >>> optimizer = hvd.DistributedOptimizer(lars, compression=hvd.TopK(density=0.5))
    >>> (w * torch.tensor([0.6, 0.8])).sum().backward()
    >>> optimizer.step()
    >>> w.detach()  # the larger half of the gradient was sent
    tensor([[3.0000, 3.9840]])
    """

    formula = optimizers.LARS


class LAMB(FormulaOptimizer):
    """LAMB.  Give biases a group with ``weight_decay=0``.

    >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> lamb = hvd.LAMB([w], lr=2e-3, weight_decay=0.01)
    >>> optimizer = hvd.DistributedOptimizer(lamb, compression=hvd.FP16)
    >>> (w * torch.tensor([0.6, 0.8])).sum().backward()
    >>> optimizer.step()
    >>> w.detach()
    tensor([2.9930, 3.9929])
    """

    formula = optimizers.LAMB


class DeMo(PartnerOptimizer):
    """DeMo.  A step with another compression, or with sparse gradients, is an error; a group may
    have its own ``lr`` and ``weight_decay``.

    >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> demo = hvd.DeMo([w], lr=1e-3)
    >>> optimizer = hvd.DistributedOptimizer(demo, compression=demo.compressor())
    >>> (w * torch.tensor([0.6, 0.8])).sum().backward()
    >>> optimizer.step()
    >>> w.detach()
    tensor([2.9990, 3.9990])
    """

    formula = optimizers.DeMo

    def begin_step(self) -> None:
        if self.binding is None:
            raise ConfigError(NO_MOMENTUM)
        parameters = (p for group in self.param_groups for p in group["params"])
        if any(p.grad is not None and p in self.binding.store.sparse for p in parameters):
            raise ConfigError(NO_ROWS)
