"""What ``sync_resnet50.py`` times under TensorFlow."""

from __future__ import annotations

import threading
import time
from typing import Any

import tensorflow as tf

import hvd_compress.tensorflow as hvd
from hvd_compress.advisor.shapes import Shapes, resnet50
from hvd_compress.tensorflow import backend

_lock = threading.Lock()
_in_python = 0.0
_on_host = backend.on_host


def _timed(function: Any, inputs: Any, outputs: Any, like: Any) -> Any:
    """What graphs call back into Python for, with a clock around it."""

    def clocked(*arrays: Any) -> Any:
        global _in_python
        start = time.perf_counter()
        try:
            return function(*arrays)
        finally:
            with _lock:
                _in_python += time.perf_counter() - start

    return _on_host(clocked, inputs, outputs, like)


backend.on_host = _timed


class Contender:
    """One tape over variables of its own, in one graph.  A sample is the time that the graph takes,
    in which backward is one multiplication a tensor, and forward nothing."""

    def __init__(self, name: str, compression: Any, shapes: Shapes | None = None) -> None:
        self.name, self.seconds, self.python = name, [], []
        self.variables = [
            tf.Variable(tf.zeros(shape), name=f"{name}.{key}")
            for key, shape in (shapes or resnet50()).items()
        ]
        self._zero = tf.Variable(0.0, trainable=False)
        self.compression: Any = None
        self._options = {"compression": compression}
        if compression not in (hvd.Compression.none, hvd.Compression.fp16):
            momentum = {"momentum": 0.9} if hvd.as_compressor(compression).takes_momentum else {}
            self.compression = hvd.bind(compression, self.variables, **momentum)
            self._options["compression"] = self.compression
        self._graph = tf.function(self._step, autograph=False)

    def _step(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        @tf.custom_gradient
        def forward(*variables: tf.Tensor) -> Any:
            def backward(dy: tf.Tensor) -> list[tf.Tensor]:
                return [dy * g for g in gradients]

            return self._zero.value(), backward

        with tf.GradientTape() as tape:
            loss = forward(*[variable.value() for variable in self.variables])
        tape = hvd.DistributedGradientTape(tape, **self._options)
        return tape.gradient(loss, self.variables)

    def sample(self, gradients: dict[str, tf.Tensor]) -> float:
        global _in_python
        given = list(gradients.values())
        hvd.allreduce(tf.constant(0.0), name="barrier")
        before, start = _in_python, time.perf_counter()
        averages = self._graph(given)
        averages[-1].numpy()  # a graph returns when all of it is done
        seconds = time.perf_counter() - start
        self.python.append(_in_python - before)
        return float(hvd.allreduce(tf.constant(seconds), op=hvd.Max, name="seconds"))


def seed(number: int) -> None:
    tf.random.set_seed(number)


def random_gradients(shapes: Shapes | None = None) -> dict[str, tf.Tensor]:
    return {key: tf.random.normal(shape) for key, shape in (shapes or resnet50()).items()}
