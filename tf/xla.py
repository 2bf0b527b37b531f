"""A clear error for ``jit_compile=True``: XLA cannot compile Horovod's collectives or Python."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from hvd_compress.errors import UnsupportedError


def refuse_xla() -> None:
    """Raise if what is being traced will be compiled by XLA, as its graph or one around it says."""
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise UnsupportedError(
            "gradients cannot be exchanged inside a function that XLA compiles: leave "
            "jit_compile=True out of tf.function, or write model.compile(..., jit_compile=False)"
        )
