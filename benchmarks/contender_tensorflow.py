"""The contender that ``steps.py`` times under TensorFlow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

import hvd_compress.tensorflow as hvd
from hvd_compress.advisor.shapes import Shapes


class Contender:
    """One tape over variables of its own, in one graph.  A sample is the time that the graph takes,
    in which backward is one multiplication a tensor, and forward nothing."""

    sent: float | None = None

    def __init__(self, name: str, weights: Mapping[str, tf.Tensor], compression: Any) -> None:
        self.name = name
        self.variables = [tf.Variable(x, name=f"{name}.{key}") for key, x in weights.items()]
        self._zero = tf.Variable(0.0, trainable=False)
        self.compression: Any = None
        self._options = {"compression": compression}
        if compression in (hvd.Compression.none, hvd.Compression.fp16):
            width = 2.0 if compression is hvd.Compression.fp16 else 4.0
            self.sent = width * sum(x.shape.num_elements() for x in self.variables)
        else:
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

    def sample(self, gradients: Mapping[str, tf.Tensor], backward: float) -> tuple[float, float]:
        """Return seconds of the slowest rank, of averages and of no step."""
        given = list(gradients.values())
        hvd.allreduce(tf.constant(0.0), name="barrier")
        start = time.perf_counter()
        averages = self._graph(given)
        averages[-1].numpy()  # a graph returns when all of it is done
        seconds = tf.constant(time.perf_counter() - start)
        return float(hvd.allreduce(seconds, op=hvd.Max, name="seconds")), 0.0


class AbsentError(Exception):
    """Why there is no such row."""


USUAL = ("Horovod fp32", "Horovod fp16", "fp16", "topk:density=0.001", "dgc:density=0.001")
USUAL += ("dgc:compact",)


def contender(name: str, weights: Mapping[str, tf.Tensor], checkout: object = None) -> Contender:
    """Return what a row times."""
    kind, _, rest = name.partition(" ")
    compressions = {"fp32": hvd.Compression.none, "fp16": hvd.Compression.fp16}
    own = compressions[rest] if kind == "Horovod" else hvd.as_compressor(name)
    return Contender(name, weights, own)


def seed(number: int) -> None:
    tf.random.set_seed(number)


def random_gradients(shapes: Shapes) -> dict[str, tf.Tensor]:
    return {key: tf.random.normal(shape) for key, shape in shapes.items()}


def zeros(shapes: Shapes) -> dict[str, tf.Tensor]:
    return {key: tf.zeros(shape) for key, shape in shapes.items()}
