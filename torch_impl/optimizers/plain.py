"""LARS, LAMB and DeMo for PyTorch."""

from __future__ import annotations

from hvd_compress import optimizers
from hvd_compress.errors import ConfigError
from hvd_compress.optimizers.demo import NO_MOMENTUM, NO_ROWS

from ..optimizer_host import FormulaOptimizer, PartnerOptimizer


class LARS(FormulaOptimizer):
    """LARS::

        optimizer = hvd.LARS(model.parameters(), lr=3.2, weight_decay=1e-4)
        optimizer = hvd.DistributedOptimizer(optimizer, compression=hvd.TopK(density=0.01))

    Compression that takes momentum over, as DGC does, leaves that of LARS alone.
    """

    formula = optimizers.LARS


class LAMB(FormulaOptimizer):
    """LAMB::

        optimizer = hvd.LAMB(model.parameters(), lr=2e-3, weight_decay=0.01)
        optimizer = hvd.DistributedOptimizer(optimizer, compression=hvd.PowerSGD(rank=4))

    Give biases a group with ``weight_decay=0``.
    """

    formula = optimizers.LAMB


class DeMo(PartnerOptimizer):
    """DeMo::

        demo = hvd.DeMo(model.parameters(), lr=1e-3)
        optimizer = hvd.DistributedOptimizer(
            demo, named_parameters=model.named_parameters(), compression=demo.compressor()
        )

    A step with another compression, or with sparse gradients, is an error; a group may have its
    own ``lr`` and ``weight_decay``.
    """

    formula = optimizers.DeMo

    def begin_step(self) -> None:
        if self.binding is None:
            raise ConfigError(NO_MOMENTUM)
        parameters = (p for group in self.param_groups for p in group["params"])
        if any(p.grad is not None and p in self.binding.store.sparse for p in parameters):
            raise ConfigError(NO_ROWS)
