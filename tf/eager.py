"""Horovod under TensorFlow, for NumPy arrays, outside of graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvd_compress.engines.base import Engine
from hvd_compress.engines.local import LocalEngine
from hvd_compress.engines.named import Op
from hvd_compress.errors import PayloadError

from .engine import HorovodEngine


class EagerEngine(HorovodEngine):
    """Collectives of NumPy arrays, each of which waits for the other ranks."""

    keeps_replies = False

    def _launch(self, op: Op) -> Any:
        found = super()._launch(op._replace(tensor=tf.convert_to_tensor(op.tensor)))
        return tuple(x.numpy() for x in found) if isinstance(found, tuple | list) else found.numpy()

    def _split(self, own: np.ndarray, everything: np.ndarray) -> list[np.ndarray]:
        if everything.size != own.size * self.size:
            raise PayloadError(
                f"the ranks' payloads differ in size: this rank's has {own.size} bytes, those of "
                f"all {self.size} together {everything.size}. Do all run the same version with the "
                "same compression options?"
            )
        return np.split(everything, self.size)

    def _splits(self, sizes: Sequence[int]) -> np.ndarray:
        return np.array(sizes, np.int32)

    def _sum_bfloat16(self, array: Any, name: str) -> Any:
        bits = yield from super()._sum_bfloat16(tf.convert_to_tensor(array), name)
        return bits.numpy()


def engine_of(process_set: Any, prefix: str, kind: type[HorovodEngine] = EagerEngine) -> Engine:
    """Return an engine for use outside of graphs.

    Args:
        process_set: of Horovod; ``None`` for all ranks.
        prefix: of the names of its collectives, the same on all ranks.
        kind: ``EagerEngine`` for NumPy arrays, ``HorovodEngine`` for eager tensors.
    """
    chosen = mpi_ops.global_process_set if process_set is None else process_set
    if not chosen.included() or chosen.size() == 1:
        return LocalEngine()
    return kind(chosen, 1.0, prefix)
