"""TensorFlow behind the interface of driver.py: a Keras optimizer, or a tape.  With
``TF_USE_LEGACY_KERAS=1`` Keras is tf_keras, version 2."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow import keras

from hvd_compress import as_compressor
from hvd_compress.errors import MismatchError
from tests.scenarios import oracle

tf.config.threading.set_inter_op_parallelism_threads(2)
tf.config.threading.set_intra_op_parallelism_threads(1)
# It rewrites each graph before its first step, and takes a tenth of a job: `graphs`, and jobs over
# MPI, have it.
if os.environ.get("SCENARIOS_GRAPPLER") == "0":
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
tf.get_logger().setLevel("ERROR")  # each run has a graph of its own, and is not retracing
over, _, library = os.environ.get("SCENARIOS_OVER", "tensorflow").partition("-")
is_keras_2 = os.environ.get("TF_USE_LEGACY_KERAS") == "1"
if library == "mpi":  # nothing may import it
    sys.modules["horovod"] = None
_ENDING = ".mpi" if library == "mpi" else ""
hvd: Any = importlib.import_module(f"hvd_compress.tensorflow{_ENDING}")
LOSSES: Any = importlib.import_module("hvd_compress.tensorflow.keras.codistillation").LOSSES
hvd_keras: Any = importlib.import_module(f"hvd_compress.tensorflow.keras{_ENDING}")
#: Horovod's own, with what this package has put into them; the first is not of Keras alone
HOROVODS: list[Any] = [
    importlib.import_module(name)
    for name in ("horovod.tensorflow", "horovod.tensorflow.keras", "horovod.keras")
    if library != "mpi" and (name != "horovod.keras" or not is_keras_2)
]


@contextlib.contextmanager
def policy(name: str) -> Iterator[None]:
    """Whatever of Keras is made meanwhile has these dtypes."""
    before = keras.mixed_precision.global_policy()
    keras.mixed_precision.set_global_policy(name)
    try:
        yield
    finally:
        keras.mixed_precision.set_global_policy(before)


#: a function of a test as a graph, without AutoGraph, which takes longer than the tracing: Keras's
#: own have it, and what is to show something of it
traced = functools.partial(tf.function, autograph=False)


def _layers(kind: str) -> list[Any]:
    if kind == "words":
        return [
            keras.Input((oracle.LENGTH,), dtype="int64"),
            keras.layers.Embedding(oracle.WORDS, oracle.DIMENSIONS),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(oracle.WIDTHS[-1], use_bias=False),
        ]
    hidden = [keras.layers.Dense(width, activation="tanh") for width in oracle.WIDTHS[1:-1]]
    inputs = keras.Input(
        (oracle.WIDTHS[0],), dtype=keras.mixed_precision.global_policy().compute_dtype
    )
    return [inputs, *hidden, keras.layers.Dense(oracle.WIDTHS[-1])]


def model_of(kind: str, dtype: str = "float32") -> Any:
    with policy(dtype):  # of the model too, which casts its inputs
        model = keras.Sequential(_layers(kind))
    wide = dtype.replace("mixed_float16", "float32")  # what the variables have
    model.set_weights(list(oracle.initial_weights(kind, wide).values()))
    return model


class _Trained:
    """A model of the oracle's network."""

    def __init__(self, kind: str, dtype: str) -> None:
        self.kind, self.dtype = kind, dtype
        self.model = model_of(kind, dtype)
        self.names = list(oracle.initial_weights(kind))

    def weights(self) -> dict[str, np.ndarray]:
        return dict(zip(self.names, self.model.get_weights(), strict=True))

    def set_weights(self, weights: dict[str, np.ndarray]) -> None:
        self.model.set_weights(list(weights.values()))

    def loss(self, z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, z))


class Student(_Trained):
    def __init__(self, weights: dict[str, np.ndarray], *args: Any, **options: Any) -> None:
        super().__init__("mlp", "float64")
        self.set_weights(weights)
        self.codistillation = hvd_keras.Codistillation(self.model, *args, **options)
        self.sgd = keras.optimizers.SGD(oracle.LR)
        self.sgd.build(self.model.trainable_variables)  # so that the graph is traced once
        self.graph = traced(self._step)

    def _losses(self, x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        z = self.model(x, training=True)
        task = self.loss(z, y)
        return task, self.codistillation.loss(task, z, x)

    def _step(self, x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            _, loss = self._losses(x, y)
        variables = self.model.trainable_variables
        self.sgd.apply(tape.gradient(loss, [v.value for v in variables]), variables)

    def step(self, rank: int, number: int) -> None:
        self.graph(*map(tf.constant, oracle.batch("mlp", rank, number, "float64")))

    def losses(self, rank: int, number: int) -> tuple[float, float]:
        found = self._losses(*map(tf.constant, oracle.batch("mlp", rank, number, "float64")))
        return float(found[0]), float(found[1])


class Run(_Trained):
    def __init__(self, method: Any, setup: oracle.Setup, options: dict[str, Any]) -> None:
        super().__init__(setup.kind, setup.dtype)
        if options.get("groups") == "two":
            options["groups"] = [list(self.model.trainable_variables[:2])]
        momentum = {"momentum": setup.momentum, "nesterov": setup.nesterov}
        self.is_tape = setup.tape or over == "tape"
        if self.is_tape:
            # A tape knows no optimizer: momentum is the method's, or the plain optimizer's.
            if as_compressor(method).takes_momentum:
                options, momentum = options | momentum, {}
            self.compression = hvd.bind(method, self.model.trainable_variables, **options)
            self.optimizer = keras.optimizers.SGD(setup.lr, **momentum)
        else:
            inner = (
                keras.optimizers.SGD(setup.lr, **momentum)
                if setup.optimizer is None
                else setup.optimizer(setup.lr)
            )
            if "method" not in options:
                options["compression"] = method
            self.optimizer = hvd_keras.DistributedOptimizer(inner, **options)
            self.optimizer.build(self.model.trainable_variables)
            self.compression = getattr(self.optimizer, "compression", None)
        variables = self.model.trainable_variables
        self.framework_names = [f"{i}.{v.name}" for i, v in enumerate(variables)]
        self.sam = None if setup.sam is None else hvd_keras.SAM(**setup.sam)
        self.graph = traced(self._step)

    def step(self, number: int, *, passes: int = 1, spoilt: bool = False) -> None:
        for part in range(passes):
            x, y = oracle.batch(self.kind, hvd.rank(), number * passes + part, self.dtype)
            self.graph(tf.constant(np.full_like(x, np.nan) if spoilt else x), tf.constant(y))

    def _step(self, x: tf.Tensor, y: tf.Tensor) -> None:
        variables = self.model.trainable_variables

        def loss_now() -> tf.Tensor:
            return self.loss(self.model(x, training=True), y)

        if self.sam is not None:
            self.optimizer.apply(self.sam.gradient(loss_now, variables)[1], variables)
            return
        with tf.GradientTape() as tape:
            loss = loss_now()
        if self.is_tape:
            tape = hvd.DistributedGradientTape(tape, compression=self.compression)
        if hasattr(self.optimizer, "training"):
            self.optimizer.report(loss)
        self.optimizer.apply(tape.gradient(loss, variables), variables)

    def states(self) -> dict[str, np.ndarray]:
        return {
            f"{self.names[int(i)]}.{key}": variable.numpy()
            for i, state in self.compression.store.states.items()
            for key, variable in state.items()
        }


def _with_torchs_names(cls: Any) -> Any:
    """An optimizer with the names of PyTorch's options."""

    def make(
        lr: Any = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, **options: Any
    ) -> Any:
        return cls(lr, *betas, eps, **options)

    return make


adam = _with_torchs_names(keras.optimizers.Adam)
onebit_adam = _with_torchs_names(hvd_keras.OneBitAdam)
zero_one_adam = _with_torchs_names(hvd_keras.ZeroOneAdam)
lars = hvd_keras.LARS
lamb = _with_torchs_names(hvd_keras.LAMB)
onebit_lamb = _with_torchs_names(hvd_keras.OneBitLAMB)


#: what a graph raises shows the error of this package; over MPI, training methods are compared
#: before there is a graph
mismatch = (tf.errors.OpError, MismatchError) if library == "mpi" else tf.errors.OpError
tensor = tf.constant


def set_step(run: Run, step: int) -> None:
    run.compression.step.assign(step)


def set_rate(run: Run, rate: float) -> None:
    run.optimizer.learning_rate = rate


def turned(name: str, weight: np.ndarray) -> np.ndarray:
    """Keras has the layout of the oracle."""
    return weight


def allgather(x: np.ndarray, **options: Any) -> np.ndarray:
    return hvd.allgather(tf.constant(x), **options).numpy()


def gradients_through(function: Any, x: Any, weight: Any) -> list[np.ndarray]:
    """Eagerly, and in a graph."""

    def gradient(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(weight * function(x))
        return tape.gradient(loss, x)

    x = tf.convert_to_tensor(x)
    found = [gradient(x), traced(gradient)(x)]
    return [tf.convert_to_tensor(each).numpy() for each in found]


def second_gradient(function: Any, x: Any) -> list[np.ndarray]:
    x = tf.convert_to_tensor(x)
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            loss = tf.reduce_sum(function(x))
        first = inner.gradient(loss, x)
    return [first.numpy(), outer.gradient(first, x).numpy()]
