"""DeMo for Keras 3 (Peng et al., 2024, arXiv 2411.19870); its messages are ``methods/demo.py``."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import ops

from hvd_compress.errors import ConfigError
from hvd_compress.methods.demo import DeMoCompression

from ..binding import native
from .partner import PartnerOptimizer


@keras.saving.register_keras_serializable(package="hvd_compress")
class DeMo(PartnerOptimizer):
    """Steps along the sign of what is large and slow in the momenta of all ranks::

        demo = hvd.DeMo(1e-3)
        optimizer = hvd.DistributedOptimizer(demo, compression=demo.compressor())

    Formula and deviations are those of :class:`hvd_compress.torch.DeMo`.

    Args:
        learning_rate: length of the step of each weight.
        decay, chunk, top_k, sign: see :class:`~hvd_compress.DeMoCompression`.
        weight_decay: decoupled from the gradient, as in AdamW.
        options: of every Keras optimizer.

    Raises:
        ConfigError: an option makes no sense; a step with another compression, with sparse
            gradients, or of a variable that stays local.
    """

    method = DeMoCompression
    schedule = ("decay", "chunk", "top_k", "sign")
    # Momentum in units of a scaled loss has the same signs, which must not be divided by the scale.
    refused = (*PartnerOptimizer.refused, "loss_scale_factor")

    def __init__(
        self,
        learning_rate: Any = 1e-3,
        decay: float = 0.999,
        chunk: int = 64,
        top_k: int = 32,
        sign: bool = True,
        weight_decay: float | None = None,
        name: str = "demo",
        **options: Any,
    ) -> None:
        own = {"decay": decay, "chunk": chunk, "top_k": top_k, "sign": sign}
        super().__init__(learning_rate, weight_decay, name, options, **own)
        self.compressor()  # checks these

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if id(native(variable)) not in self._places:
            raise ConfigError(
                f"DeMo has its momentum in its compression, and takes no step of {variable.name} "
                "without it: write demo = hvd.DeMo(...) and hvd.DistributedOptimizer(demo, "
                "compression=demo.compressor()), and register no local variables"
            )
        if isinstance(gradient, tf.IndexedSlices):
            raise ConfigError(
                "DeMo transforms whole tensors, and sparse gradients have no momentum: pass "
                "sparse_as_dense=True to hvd.DistributedOptimizer"
            )
        rate, direction = (ops.cast(x, variable.dtype) for x in (learning_rate, gradient))
        variable.assign(variable - rate * direction)


# The class of a distributed optimizer is made from this one, and is saved under its bare name.
keras.saving.get_custom_objects()["DeMo"] = DeMo
