"""Lightning's Trainer with compressed gradients, on GPUs and on CPUs::

    strategy = CompressedDDPStrategy(DGC(density=0.01, momentum=0.9))
    trainer = lightning.pytorch.Trainer(strategy=strategy, ...)

Lightning's own ``DDPStrategy(ddp_comm_hook=...)`` leaves hooks out where there is no GPU, without a
word, and keeps nothing of their state in checkpoints.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from hvd_compress.errors import SetupError

from .amp import refuse_scale
from .ddp.hook import STATE_OPTIONS, DDPState, ddp_hook

try:
    from lightning.pytorch.strategies import DDPStrategy
except ImportError:
    try:  # the same under its older name
        from pytorch_lightning.strategies import DDPStrategy
    except ImportError as error:
        raise SetupError(
            "hvd_compress.torch.lightning needs Lightning: pip install 'hvd_compress[lightning]', "
            "or lightning"
        ) from error

__all__ = ["CompressedDDPStrategy", "CompressedGradients"]
KEY = "hvd_compress"


class CompressedGradients:
    """The part that :class:`CompressedDDPStrategy` adds to ``DDPStrategy``, for strategies of your
    own.

    Put it before the strategy that you derive from: ``class Mine(CompressedGradients,
    OtherStrategy)``. Checkpoints hold the state under the key "hvd_compress".  They are written by
    all ranks together, as Lightning's own are.  Schedules by epoch follow Lightning's epochs.

    Args:
        compression, momentum, nesterov, seed, residuals, nodes: as for
            :class:`~hvd_compress.torch.DDPState`, which is made with the model.
        options: those of the strategy.

    Raises:
        ConfigError: from ``trainer.fit``: those of ``DDPState``; or a method with residuals and
            ``precision="16-mixed"``, whose loss scale changes.

    >>> from hvd_compress.torch.lightning import CompressedGradients
    >>> from lightning.pytorch.strategies import DDPStrategy
    >>> class Mine(CompressedGradients, DDPStrategy):
    ...     strategy_name = "mine"
    >>> Mine(hvd.TopK(density=0.01), find_unused_parameters=True).strategy_name
    'mine'
    """

    def __init__(self, compression: Any, **options: Any) -> None:
        ours = {name: options.pop(name) for name in STATE_OPTIONS & options.keys()}
        self._make: Any = functools.partial(DDPState, compression, **ours)
        #: statistics and state; ``None`` until the model is distributed
        self.compression: DDPState | None = None
        self._of: Any = None
        super().__init__(**options)

    def configure_ddp(self) -> None:
        super().configure_ddp()  # type: ignore[misc]
        model: Any = self.model  # type: ignore[attr-defined]
        if self.compression is None or self._of is not model.module:  # not yet in another fit
            self.compression, self._of = self._make(model), model.module
        scaler = getattr(self.precision_plugin, "scaler", None)  # type: ignore[attr-defined]
        method = self.compression.reducer.method
        refuse_scale(method, scaler is not None, 'precision="bf16-mixed"')
        model.register_comm_hook(self.compression, ddp_hook)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)  # type: ignore[misc]
        if self.compression is not None:
            module: Any = self.lightning_module  # type: ignore[attr-defined]
            self.compression.set_epoch(module.current_epoch)

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **options: Any) -> None:
        if self.compression is not None and "optimizer_states" in checkpoint:  # not weights alone
            checkpoint = {**checkpoint, KEY: self.compression.state_dict()}
        super().save_checkpoint(checkpoint, *args, **options)  # type: ignore[misc]

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)  # type: ignore[misc]
        if self.compression is not None and KEY in checkpoint:  # else of a dense run
            self.compression.load_state_dict(checkpoint[KEY])


class CompressedDDPStrategy(CompressedGradients, DDPStrategy):
    """Lightning's ``DDPStrategy`` with compressed gradients::

        strategy = CompressedDDPStrategy(hvd.DGC(density=0.01, momentum=0.9))
        trainer = lightning.Trainer(strategy=strategy, devices=4)

    Args:
        compression, momentum, nesterov, seed, residuals, nodes: as for
            :class:`~hvd_compress.torch.DDPState`.
        options: those of ``DDPStrategy``.

    Raises: the errors of :class:`CompressedGradients`.

    >>> strategy = CompressedDDPStrategy(hvd.DGC(density=0.01, momentum=0.9))
    >>> print(strategy.compression)  # a DDPState, once fit() has the model
    None
    """
