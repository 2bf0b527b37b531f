"""Clear errors where gradients cannot be exchanged: in functions that XLA compiles, which can
neither compile Horovod's collectives nor Python, and in the graphs of TensorFlow 1."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from hvd_compress.errors import ConfigError, UnsupportedError


def check_context() -> None:
    """Raise unless what is traced now, if anything, may exchange gradients."""
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise UnsupportedError(
            "gradients cannot be exchanged inside a function that XLA compiles: leave "
            "jit_compile=True out of tf.function, or write model.compile(..., jit_compile=False)"
        )
    with tf.init_scope():  # out of functions, and of nothing else
        is_graph = not tf.executing_eagerly()
    if is_graph:
        raise UnsupportedError(
            "this package's methods keep their state in eager variables, which a graph of "
            "TensorFlow 1 (tf.Graph, placeholders, tf.compat.v1.Session) cannot write: leave out "
            "tf.compat.v1.disable_eager_execution(), or call "
            "tf.compat.v1.enable_eager_execution() first, and put the step into a tf.function; "
            "or pass Horovod's own compression=hvd.Compression.fp16"
        )


def check_device(option: str, device: Any) -> None:
    """Raise ``ConfigError`` unless ``tf.device`` takes a value."""
    try:
        tf.DeviceSpec.from_string(device)
    except (AttributeError, TypeError, ValueError):
        raise ConfigError(
            f'{option} must be a name of a device such as "GPU:0"; got {device!r}'
        ) from None
