"""Scenarios of TensorFlow and Keras alone: doors, ``fit``, tapes, models that are saved, mixed
precision, and refusals."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import re
import tempfile
import warnings
import weakref
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow import keras

from hvd_compress import BF16, DGC, FP16, LGC, NoCompression, StagedWarmup, TopK
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.tensorflow.optimizer import Keras3Optimizer, KerasCompressedOptimizer
from tests.scenarios import applies, horovod_only, oracle
from tests.scenarios.driver import (
    assert_close,
    assert_same_everywhere,
    barrier,
    make,
    raises,
)
from tests.scenarios.driver_tensorflow import HOROVODS, hvd, hvd_keras, model_of, policy, traced

SPARSE = DGC(density=0.05)
DENSE = DGC(density=1.0)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def sgd(lr: Any = oracle.LR, **options: Any) -> Any:
    return keras.optimizers.SGD(lr, **{"momentum": 0.9, **options})


def weights_of(model: Any) -> dict[str, np.ndarray]:
    return dict(zip(oracle.initial_weights("mlp"), model.get_weights(), strict=True))


def data(steps: Any) -> tuple[np.ndarray, np.ndarray]:
    """Batches of this rank, one behind the other: of so many steps, or of these."""
    steps = range(steps) if isinstance(steps, int) else steps
    batches = [oracle.batch("mlp", hvd.rank(), step) for step in steps]
    return np.concatenate([x for x, _ in batches]), np.concatenate([y for _, y in batches])


def fit(
    optimizer: Any,
    callbacks: Any = (),
    *,
    steps: Any = 8,
    epochs: int = 1,
    model: Any = None,
    built: bool = True,
    validates: bool = False,
    **options: Any,
) -> tuple[Any, dict[str, Any]]:
    """``built``: variables are made before the graph is traced, which is then traced once;
    metrics that Keras makes in the graph let it be traced twice.  No optimizer: the model's."""
    model = model or model_of("mlp")
    if optimizer is not None:
        model.compile(optimizer, loss=LOSS, **options)
    if built:
        model.optimizer.build(model.trainable_variables)
    # Keras traces functions of its own to cut batches out of arrays.
    batches = tf.data.Dataset.from_tensor_slices(data(steps)).batch(8)
    own = {"shuffle": False, "verbose": 0, "epochs": epochs}
    own |= {"validation_data": batches} if validates else {}
    return model, model.fit(batches, callbacks=list(callbacks), **own).history


def apply(optimizer: Any, model: Any, steps: Any, ranks: Any = None) -> dict[str, np.ndarray]:
    """Steps without a graph, along the mean gradient of these ranks, or of this one; returns the
    weights."""
    ranks = [hvd.rank()] if ranks is None else ranks
    for step in steps:
        weights = weights_of(model)
        found = [oracle.gradients("mlp", weights, rank, step) for rank in ranks]
        mean = [tf.constant(sum(g[name] for g in found) / len(ranks)) for name in weights]
        optimizer.apply(mean, model.trainable_variables)
    return weights_of(model)


def fit_is_the_oracle() -> None:
    optimizer = hvd_keras.DistributedOptimizer(sgd(), compression=SPARSE)
    model, _ = fit(optimizer, built=False)
    assert_same_everywhere(weights_of(model))
    expected = oracle.compressed(SPARSE, range(8), hvd.size())
    assert_close(weights_of(model), expected, 1e-3, 1e-4)


def all_doors_train_as_the_oracle() -> None:
    """By each import line, with what Horovod takes; without a word it reduces as Horovod does."""
    halved = sgd(oracle.LR / hvd.size())
    devices = {"device_dense": "/cpu:0", "device_sparse": "/cpu:0", "num_groups": 2}
    first, *others = HOROVODS or [hvd]
    rows = [
        (first, halved, {"compression": DENSE, "op": hvd.Sum}),  # Horovod's own drops op
        *((module, sgd(), {"compression": DENSE}) for module in others),
        (hvd, sgd(), {"compression": DENSE, "name": "mine", **devices}),
        (hvd_keras, sgd(), {"compression": hvd.Compression.none, "name": "mine", **devices}),
        (hvd, sgd(), {}),
    ]
    expected = oracle.dense(range(2), hvd.size())
    for module, inner, options in rows:
        optimizer = module.DistributedOptimizer(inner, **options)
        assert optimizer.name == options.get("name", optimizer.name)
        assert_close(apply(optimizer, model_of("mlp"), range(2)), expected)
    optimizer = hvd_keras.DistributedOptimizer(sgd(), compression=hvd.Compression.fp16)
    assert optimizer.distribution.method == FP16()


@horovod_only
def horovods_own_optimizer_says_that_it_would_not_reduce() -> None:
    for module in HOROVODS:
        with raises(UnsupportedError, "Keras 3", "import hvd_compress.tensorflow.keras as hvd"):
            module.DistributedOptimizer(sgd())
    early = HOROVODS[1].DistributedOptimizer.__wrapped__
    with raises(UnsupportedError, "after the import"):
        early(sgd(), compression=SPARSE)


def tapes_in_eager_loops_are_traced_once() -> None:
    model = model_of("mlp")
    for step in range(5):
        binding = _tape_step(model, DENSE, step)
    assert_close(weights_of(model), oracle.dense(range(5), hvd.size(), momentum=0.0))
    assert int(binding.step) == 5
    assert binding._traced.experimental_get_tracing_count() == 1
    assert hvd.bind(binding.method, model.trainable_variables) is binding
    other = hvd.bind(binding.method, model_of("mlp").trainable_variables)
    assert other is not binding, "two models do not share state"


def _tape_step(model: Any, method: Any, step: int) -> Any:
    x, y = oracle.batch("mlp", hvd.rank(), step)
    with tf.GradientTape() as tape:
        loss = LOSS(y, model(x, training=True))
    own = DGC(density=method.density, momentum=0.0)
    tape = hvd.DistributedGradientTape(tape, compression=own)
    gradients = tape.gradient(loss, model.trainable_variables)
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        variable.assign_sub(oracle.LR * gradient)
    return tape.compression


def a_tape_without_a_word_on_momentum_warns() -> None:
    variable = tf.Variable(tf.ones([40, 40]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with tf.GradientTape() as tape:
                y = tf.reduce_sum(variable**2)
            hvd.DistributedGradientTape(tape, compression=DGC).gradient(y, variable)
    messages = [str(w.message) for w in caught if "momentum=0.9" in str(w.message)]
    assert len(messages) == (1 if hvd.rank() == 0 else 0), messages


def tapes_take_any_nest_of_sources() -> None:
    a, b = tf.Variable(tf.ones([3]) * (hvd.rank() + 1)), tf.Variable(2.0)
    mean = (hvd.size() + 1) / 2
    for sources in ([a, b], (a, b), {"a": a, "b": b}):
        with tf.GradientTape(persistent=True) as tape:
            y = tf.reduce_sum(a**2) * b
        tape = hvd.DistributedGradientTape(tape, compression=NoCompression)
        found = tape.gradient(y, sources)
        assert type(found) is type(sources)
        ga = found["a"] if isinstance(sources, dict) else found[0]
        np.testing.assert_allclose(ga, np.full(3, 4 * mean), rtol=1e-6)
    np.testing.assert_allclose(tape.gradient(y, a), np.full(3, 4 * mean), rtol=1e-6)
    assert tape.gradient(y, [tf.Variable(1.0), a])[0] is None


def parts_of_a_model_stay_local() -> None:
    """They do under a tape and an optimizer, which ``PartialDistributedOptimizer`` makes too, in a
    graph as without one."""
    model = model_of("mlp")
    x, y = oracle.batch("mlp", hvd.rank(), 0)
    initial = oracle.initial_weights("mlp")
    everyones = [oracle.gradients("mlp", initial, rank, 0) for rank in range(hvd.size())]
    own = everyones[hvd.rank()]
    for scale in (True, False):
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x, training=True))
        tape = hvd.PartialDistributedGradientTape(
            tape,
            compression=NoCompression,
            local_layers=model.layers[0],
            scale_local_gradients=scale,
        )
        found = tape.gradient(loss, model.trainable_variables)
        for name, gradient in zip(own, found, strict=True):
            local = own[name] / (hvd.size() if scale else 1)
            mean = sum(g[name] for g in everyones) / hvd.size()
            expected = local if name in ("kernel0", "bias0") else mean
            np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)
    weights, velocity = oracle.initial_weights("mlp"), {}
    for step in range(4):
        found = oracle.gradients("mlp", weights, hvd.rank(), step)
        shared = {k: g for k, g in found.items() if k not in ("kernel0", "bias0")}
        sums = hvd.grouped_allreduce(
            [tf.constant(g) for g in shared.values()], op=hvd.Average, name=f"reference.{step}"
        )
        found |= {k: g.numpy() for k, g in zip(shared, sums, strict=True)}
        for k, g in found.items():
            velocity[k] = 0.9 * velocity.get(k, 0) + g
            weights[k] = weights[k] - oracle.LR * velocity[k]
    options = {"compression": DENSE, "scale_local_gradients": False}
    registered, model = hvd_keras.DistributedOptimizer(sgd(), **options), model_of("mlp")
    for variable in model.layers[0].trainable_variables:
        registered.register_local_var(variable)
    assert_close(apply(registered, model, range(4)), weights, 1e-4, 1e-5)
    for module in (*HOROVODS[2:], hvd_keras):
        model = model_of("mlp")
        layers = {"local_layers": model.layers[0]}
        partial = module.PartialDistributedOptimizer(sgd(), **layers, **options)
        partial.build(model.trainable_variables)
        assert not partial.distribution.scale_local
        assert len(partial.compression.store.slots) == 2
    fit(partial, model=model, steps=4)
    assert_close(weights_of(model), weights, 1e-4, 1e-5)
    with raises(ConfigError, "local_layers"):
        hvd_keras.PartialDistributedOptimizer(sgd(), local_layers=["dense"])


def rows_that_stay_local_have_momentum() -> None:
    """An embedding on its own rank goes the way of plain SGD, as what is averaged does."""
    table, shared = keras.Variable(np.zeros([4, 2], "float32")), keras.Variable(np.zeros(3, "f4"))
    optimizer = hvd_keras.DistributedOptimizer(
        sgd(1.0), compression=DENSE, scale_local_gradients=False
    )
    optimizer.register_local_var(table)
    rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1]), tf.constant([4, 2]))
    for _ in range(3):
        optimizer.apply([rows, tf.ones(3)], [table, shared])
    after = -(1 + 1.9 + 2.71)
    np.testing.assert_allclose(table, [[0, 0], [after] * 2, [0, 0], [0, 0]], rtol=1e-6)
    np.testing.assert_allclose(shared, [after] * 3, rtol=1e-6)


def single_tensors() -> None:
    x = tf.constant([[1.0, -2.0, 3.0], [4.0, 5.0, -6.0]]) * float(hvd.rank() + 1)
    mean = np.array([[1, -2, 3], [4, 5, -6]]) * (hvd.size() + 1) / 2
    for method in (NoCompression, FP16(), BF16, "fp16"):
        np.testing.assert_allclose(hvd.allreduce(x, compression=method), mean, rtol=1e-2)
    total = hvd.allreduce(x, compression=FP16(), op=hvd.Sum)
    np.testing.assert_allclose(total, mean * hvd.size(), rtol=1e-2)
    for y, factor in zip(hvd.grouped_allreduce([x, 2 * x], compression=BF16), (1, 2), strict=True):
        np.testing.assert_allclose(y, factor * mean, rtol=1e-2)
    with raises(ConfigError, "name"):
        hvd.allreduce(x, compression=TopK(density=0.5))
    sums = sum(hvd.allreduce(x, compression=TopK(density=0.5), name="x").numpy() for _ in range(9))
    assert np.abs(sums / 9 - mean).max() < np.abs(mean).max() / 2, "what waits is sent later"
    with raises(ConfigError, "prescale_factor"):
        hvd.allreduce(x, compression=FP16, prescale_factor=2.0)
    rows = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([1, 1]), tf.constant([4, 3]))
    found = tf.convert_to_tensor(hvd.allreduce(rows, compression=NoCompression))
    np.testing.assert_allclose(found, [[0] * 3, [2] * 3, [0] * 3, [0] * 3])
    variable = tf.Variable(x)
    with tf.GradientTape() as tape:  # Horovod's own, with one source
        y = tf.reduce_sum(variable)
    tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.none)
    np.testing.assert_allclose(tape.gradient(y, [variable])[0], np.ones([2, 3]))
    untouched = hvd.allreduce(x, compression=hvd.Compression.fp16)
    np.testing.assert_allclose(untouched, mean, rtol=1e-2)


def models_are_saved_and_go_on() -> None:
    """Plain Keras loads them, without this package; and so do we, with the state."""
    optimizer = hvd_keras.DistributedOptimizer(sgd(), compression=SPARSE)
    model, _ = fit(optimizer, [hvd_keras.callbacks.CompressionCallback()])
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp(), root_rank=0, name="folder"))
    path = folder / "model.keras"
    if hvd.rank() == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            model.save(path)
    barrier()
    loaded = hvd_keras.load_model(path, compression=SPARSE)
    binding = loaded.optimizer.compression
    assert int(binding.step) == 8
    velocity = binding.store.states["0"]["velocity"].numpy().reshape(40, -1)
    for i, state in optimizer.compression.store.states.items():
        for key, variable in state.items():
            np.testing.assert_array_equal(binding.store.states[i][key], variable)
    for m in (model, loaded):
        fit(None, model=m, steps=4)
        assert_same_everywhere(weights_of(m))
    assert_close(weights_of(loaded), weights_of(model), 1e-5, 1e-6)
    assert b"hvd_compress" not in zipfile.ZipFile(path).read("config.json")
    plain = keras.models.load_model(path)  # warnings are errors here
    assert type(plain.optimizer) is keras.optimizers.SGD
    assert (plain.optimizer.momentum, int(plain.optimizer.iterations)) == (0.9, 8)
    np.testing.assert_allclose(plain.optimizer.momentums[0], -oracle.LR * velocity, rtol=1e-5)
    plain.compile(sgd(), loss=LOSS)
    apply(plain.optimizer, plain, range(1))
    own = folder / f"plain-{hvd.rank()}.keras"
    plain.save(own)  # and one of plain Keras can be taken over
    taken = hvd_keras.load_model(own, compression=TopK(density=0.1))
    assert int(np.asarray(taken.optimizer.iterations)) == 1
    assert int(taken.optimizer.compression.step) == 0
    for a, b in zip(taken.optimizer.momentums, plain.optimizer.momentums, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hvd_keras.load_model(path, compression=TopK(density=0.1))
    assert any("no use for 'velocity'" in str(w.message) for w in caught)
    barrier()  # all have read it


def momentum_goes_on_in_the_exchange_and_back() -> None:
    """Three steps of plain SGD, three of ours, three of plain SGD: nine steps of SGD.

    Momentum that is not Nesterov's goes on in ``models_are_saved_and_go_on``, and is taken over in
    ``keras_restore.momentum_that_is_damaged_is_not_taken_over``.
    """
    everyone, model, plain = range(hvd.size()), model_of("mlp"), sgd(nesterov=True)
    apply(plain, model, range(3), everyone)
    ours = hvd_keras.DistributedOptimizer(plain, compression=DENSE)
    apply(ours, model, range(3, 6))
    ours.compression.consolidate()
    store: dict[str, np.ndarray] = {}
    ours.save_own_variables(store)
    again = sgd(nesterov=True)
    again.build(model.trainable_variables)
    again.load_own_variables(store)
    found = apply(again, model, range(6, 9), everyone)
    expected = apply(sgd(nesterov=True), model_of("mlp"), range(9), everyone)
    assert_close(found, expected, 1e-5, 1e-6)


def optimizers_with_attributes_of_our_names_are_taken_over() -> None:
    """Adam and others call their second moments as a method of ours could be called."""
    names = {name for cls in (Keras3Optimizer, KerasCompressedOptimizer) for name in vars(cls)}
    for name, cls in sorted(vars(keras.optimizers).items()):
        if not isinstance(cls, type) or not issubclass(cls, keras.optimizers.Optimizer):
            continue
        with contextlib.suppress(TypeError, ValueError):  # it is abstract, or wants another
            optimizer = cls()
            optimizer.build([keras.Variable([1.0])])
            assert not vars(optimizer).keys() & names, name
    plain, model = keras.optimizers.Adam(1e-3), model_of("mlp")
    apply(plain, model, range(1))
    taken = hvd_keras.DistributedOptimizer(plain, compression=TopK(density=0.5))
    assert int(taken.iterations) == 1
    for x, y in zip(plain.variables, taken.variables, strict=True):
        np.testing.assert_array_equal(x, y)


def names_of_layers_do_not_matter_in_checkpoints_of_tensorflow() -> None:
    """The layers of each model have other numbers in their names, and those of one, dense_99 and
    dense_100, are not in the order of the alphabet."""
    while not re.fullmatch("dense_9*8", keras.layers.Dense(1).name):
        pass
    method = LGC(density=0.05, learn=1, code=5)
    run, other = make(method), make(method)
    for number, state in enumerate(run.compression.store.states.values()):
        for variable in state.values():
            variable.assign(tf.fill(variable.shape, tf.cast(number + 0.5, variable.dtype)))
    run.compression.step.assign(4)
    run.compression.consolidate()
    with tempfile.TemporaryDirectory() as folder:
        saved = tf.train.Checkpoint(model=run.model, compression=run.compression).save(
            f"{folder}/checkpoint"
        )
        both = tf.train.Checkpoint(model=other.model, compression=other.compression)
        both.restore(saved).assert_consumed()
    assert int(other.compression.step) == 4
    assert len(run.states()) > len(run.weights())
    for key, value in run.states().items():
        np.testing.assert_array_equal(other.states()[key], value)


def scaled_step(model: Any, optimizer: Any) -> Any:
    variables = model.trainable_variables

    @traced
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(LOSS(y, model(x, training=True)))
        optimizer.apply(tape.gradient(loss, variables), variables)

    return step


def loss_scaling() -> None:
    """Overflow on one rank: all skip the step, none remembers it, and the scale falls."""
    with policy("mixed_float16"):
        distributed = hvd_keras.DistributedOptimizer(sgd(), compression=SPARSE)
    assert isinstance(distributed, keras.optimizers.LossScaleOptimizer)
    inner = keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=2.0**10)
    distributed, model = hvd_keras.DistributedOptimizer(inner, compression=SPARSE), model_of("mlp")
    assert isinstance(distributed, keras.optimizers.LossScaleOptimizer)
    step = scaled_step(model, distributed)
    for number in range(4):
        step(*map(tf.constant, oracle.batch("mlp", hvd.rank(), number)))
    expected = oracle.compressed(SPARSE, range(4), hvd.size())
    assert_close(weights_of(model), expected, 1e-3, 1e-4)
    weights, scale = weights_of(model), float(np.asarray(distributed.dynamic_scale))
    states = {k: v.numpy() for k, v in distributed.compression.store.states["0"].items()}
    x, y = oracle.batch("mlp", hvd.rank(), 4)
    step(tf.constant(np.full_like(x, np.inf) if hvd.rank() == 0 else x), tf.constant(y))
    assert_close(weights_of(model), weights, 0, 0)
    assert float(np.asarray(distributed.dynamic_scale)) == scale / 2
    for key, state in states.items():
        np.testing.assert_array_equal(distributed.compression.store.states["0"][key], state)
    step(tf.constant(x), tf.constant(y))
    assert_same_everywhere(weights_of(model))


def loss_scaling_the_other_way_round_is_refused() -> None:
    """Whoever wraps it: the user, or Keras, before the first step."""
    for options in ({}, {"loss_scale_factor": 8.0}):
        inner = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1, **options))
        with raises(UnsupportedError, "hvd.DistributedOptimizer", "LossScaleOptimizer"):
            keras.optimizers.LossScaleOptimizer(inner)
    with policy("mixed_float16"):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    with raises(UnsupportedError, "set the policy mixed_float16 before"):
        model.compile(hvd_keras.DistributedOptimizer(sgd(), compression=SPARSE), loss=LOSS)


def a_name_means_nothing() -> None:
    """Nor does a number that is no mark of a ``LossScaleOptimizer``."""

    class LossScaleOptimizerTest(keras.optimizers.SGD): ...

    optimizer = hvd_keras.DistributedOptimizer(LossScaleOptimizerTest(0.1), compression=SPARSE)
    apply(optimizer, model_of("mlp"), range(1))
    assert int(optimizer.compression.step) == 1
    optimizer.loss_scale_factor = 2.0
    assert optimizer.loss_scale_factor == 2.0


def half_precision_variables_under_a_scale() -> None:
    variable = keras.Variable(np.zeros([4, 4], "float16"), dtype="float16")
    inner = keras.optimizers.LossScaleOptimizer(sgd(1.0, momentum=0.0), initial_scale=2.0**15)
    optimizer = hvd_keras.DistributedOptimizer(inner, compression=TopK(density=1.0))
    gradient = tf.fill([4, 4], tf.constant(3.3e-4 * 2**15, tf.float16))
    optimizer.apply([gradient], [variable])
    np.testing.assert_allclose(np.asarray(variable), -3.3e-4, rtol=1e-2)


def two_models_with_the_same_names_in_a_branch_of_the_users() -> None:
    """One inside of a graph of its own, under options that make branches, too."""
    dense_for_now = DGC(StagedWarmup("step", 100, (1.0, 0.25)), min_size=0)
    first, other = (make(dense_for_now, backward_passes_per_step=2, lr=0.02) for _ in range(2))

    inline = tf.autograph.experimental.do_not_convert(first._step)

    @tf.function
    def every_other(x, y, number):
        if number % 2 == 0:
            inline(x, y)
            other.graph(x, y)

    for number in range(8):
        x, y = oracle.batch("mlp", hvd.rank(), number // 2)
        every_other(tf.constant(x), tf.constant(y), tf.constant(number))
    assert every_other.experimental_get_tracing_count() == 1
    assert other.graph.experimental_get_tracing_count() == 1
    assert_same_everywhere(first.weights())
    assert_close(first.weights(), other.weights(), 0, 0)
    assert_close(first.weights(), oracle.dense(range(2), hvd.size(), lr=0.02, passes=2))


def passes_are_added_by_variable() -> None:
    a, b = (keras.Variable(np.zeros(3, "float32"), name=name) for name in "ab")
    optimizer = hvd_keras.DistributedOptimizer(
        sgd(1.0, momentum=0.0), compression=NoCompression, backward_passes_per_step=2
    )
    optimizer.build([a, b])
    optimizer.apply([tf.ones(3), 2 * tf.ones(3)], [a, b])
    optimizer.apply([2 * tf.ones(3), tf.ones(3)], [b, a])
    np.testing.assert_allclose([np.asarray(a), np.asarray(b)], [[-2] * 3, [-4] * 3])


def rows_now_and_dense_then() -> None:
    variable = tf.Variable(tf.zeros([40, 40]))
    rows = tf.IndexedSlices(tf.ones([1, 40]), tf.constant([3]), tf.constant([40, 40]))
    dense = tf.random.stateless_normal([40, 40], [1, hvd.rank()])
    binding = hvd.bind(TopK(density=0.05), [variable])
    for gradient in (rows, dense, rows):
        [found] = binding.reduce([gradient])
        waits = binding.store.states["0"]["residual"].numpy()
    np.testing.assert_allclose(tf.convert_to_tensor(found)[3], np.ones(40))
    assert np.abs(waits).sum() > 0, "what waits goes on waiting"


def rows_that_wait_are_saved_and_go_on() -> None:
    method = NoCompression(rows="top:0.5")
    variable = tf.Variable(tf.zeros([6, 2]))
    binding = hvd.bind(method, [variable])
    values = tf.constant([[1.0, 0.0], [0.0, 2.0]]) * (1 + hvd.rank())
    rows = tf.IndexedSlices(values, tf.constant([4, 1]), tf.constant([6, 2]))
    [found] = binding.reduce([rows])
    assert found.indices.numpy().tolist() == [1]
    waits = np.zeros([6, 2], "float32")
    waits[4, 0] = 1 + hvd.rank()
    np.testing.assert_array_equal(binding.store.states["0"]["residual"], waits.ravel())
    binding.consolidate()
    waits[4, 0] = (1 + hvd.size()) / 2  # the mean
    np.testing.assert_allclose(binding.store.states["0"]["residual"], waits.ravel())
    other = hvd.bind(method, [tf.Variable(tf.zeros([6, 2]))])
    other.load_values(binding.values())
    np.testing.assert_allclose(other.store.states["0"]["residual"], waits.ravel())
    [found] = other.reduce([tf.IndexedSlices(tf.zeros([1, 2]), tf.constant([4]), rows.dense_shape)])
    np.testing.assert_allclose(found.values, [waits[4]])
    assert not np.any(other.store.states["0"]["residual"])
    with raises(ConfigError, "name"):
        hvd.allreduce(rows, compression=method)


class Rate(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return oracle.LR

    def get_config(self):
        return {}


def what_is_not_in_the_configuration_comes_along() -> None:
    """A schedule of one's own, what does not decay, and a rate that begins at zero."""
    inner = sgd(Rate(), weight_decay=0.1)
    inner.exclude_from_weight_decay(var_names=["bias"])
    optimizer, model = hvd_keras.DistributedOptimizer(inner, compression=DENSE), model_of("mlp")
    zeros = [tf.zeros(v.shape) for v in model.trainable_variables]
    before = weights_of(model)
    optimizer.apply(zeros, model.trainable_variables)
    for name, weight in weights_of(model).items():
        changed = np.abs(weight - before[name]).max() > 0
        assert changed == name.startswith("kernel"), name
    rate = keras.optimizers.schedules.CosineDecay(0.0, 100, warmup_target=0.1, warmup_steps=10)
    inner, model = sgd(rate), model_of("mlp")
    inner.build(model.trainable_variables)
    optimizer = hvd_keras.DistributedOptimizer(inner, compression=DENSE)
    assert all(np.isfinite(w).all() for w in apply(optimizer, model, range(3)).values())


def gradients_may_be_clipped() -> None:
    """After the exchange, as all optimizers of Keras do."""
    kinds, model = ("clipnorm", "global_clipnorm", "clipvalue"), model_of("mlp")
    optimizer = hvd_keras.DistributedOptimizer(sgd(momentum=0.0), compression=DENSE)
    for step, kind in enumerate(kinds):
        most = 1e-3 if kind == "clipvalue" else 0.01
        for other in kinds:
            setattr(optimizer, other, most if other == kind else None)
        before, found = weights_of(model), apply(optimizer, model, [step])
        change = {k: (w - before[k]) / oracle.LR for k, w in found.items()}
        flat = np.concatenate([c.reshape(-1) for c in change.values()])
        largest = {
            "clipnorm": np.linalg.norm(change["kernel0"]),
            "global_clipnorm": np.linalg.norm(flat),
            "clipvalue": np.abs(flat).max(),
        }[kind]
        np.testing.assert_allclose(largest, most, rtol=1e-2)
        assert_same_everywhere(found)


def xla_is_refused() -> None:
    optimizer = hvd_keras.DistributedOptimizer(sgd(), compression=SPARSE)
    with raises(UnsupportedError, "jit_compile=False"):
        fit(optimizer, jit_compile=True)
    model = model_of("mlp")

    @tf.function(jit_compile=True)
    def step():
        _tape_step(model, SPARSE, 0)

    with raises(UnsupportedError, "jit_compile"):
        step()


def schedules_by_epoch_need_epochs() -> None:
    method, model = DGC(density=StagedWarmup("epoch", 1, (0.5, 0.05))), model_of("mlp")
    optimizer = hvd_keras.DistributedOptimizer(sgd(), compression=method)
    with raises(tf.errors.InvalidArgumentError, "set_epoch"):
        apply(optimizer, model, range(1))
    assert int(optimizer.compression.step) == 0
    barrier()
    announce = hvd_keras.callbacks.CompressionCallback()
    fit(optimizer, [announce], model=model, steps=2, run_eagerly=True)
    assert (int(optimizer.compression.step), int(optimizer.compression.epoch)) == (2, 0)


@horovod_only
@applies(least=2)  # alone, nothing travels
def a_damaged_message_is_an_error() -> None:
    from hvd_compress.tensorflow.engine import HorovodGraphEngine

    honest = HorovodGraphEngine._launch

    def damage(self, op):
        return honest(self, op._replace(tensor=op.tensor ^ tf.constant(16, tf.uint8)))

    variable = tf.Variable(tf.random.stateless_normal([64, 64], [hvd.rank(), 1]))
    if hvd.rank() == 1:
        HorovodGraphEngine._launch = damage
    try:
        for loss in (lambda v: v**2, lambda v: tf.gather(v, [1, 5]) ** 2):
            with tf.GradientTape() as tape:
                y = tf.reduce_sum(loss(variable))
            tape = hvd.DistributedGradientTape(tape, compression=TopK(density=0.05))
            with raises(tf.errors.OpError, "PayloadError", "rank 1"):
                tape.gradient(y, [variable])
    finally:
        HorovodGraphEngine._launch = honest


def what_cannot_work_says_what_to_write() -> None:
    optimizer = hvd_keras.DistributedOptimizer(sgd(), compression=SPARSE)
    legacy = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    accumulating = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    for inner, method, error, words in (
        (optimizer, SPARSE, ConfigError, "distributed already"),
        (legacy, SPARSE, UnsupportedError, "tf.compat.v1|no Keras optimizer"),
        (object(), SPARSE, UnsupportedError, "no Keras optimizer"),
        (sgd(), DGC(weight_decay="gradient"), ConfigError, "weight_decay"),
        (accumulating, SPARSE, ConfigError, "backward_passes_per_step=2"),
        # Nothing can change a graph's method later.
        (sgd(), "auto:steps=9", ConfigError, "advise --measure"),
    ):
        with raises(error, words):
            hvd.DistributedOptimizer(inner, compression=method)
    weight = tf.Variable([1.0, 2.0])
    with hvd.DistributedGradientTape(tf.GradientTape(), compression="auto") as tape:
        loss = tf.reduce_sum(weight * weight)
    with raises(ConfigError, "advise --measure"):
        tape.gradient(loss, [weight])
    with raises(AttributeError, "optimizer.build"):
        _ = optimizer.compression
    with raises(ConfigError, "variables"):
        hvd.bind(FP16, [tf.constant(1.0)])
    with raises(UnsupportedError, "integers|int32"):
        hvd.allreduce(tf.constant([1, 2]), compression=FP16)
    run = make(DENSE, kind="words", backward_passes_per_step=2)
    with raises(UnsupportedError, "join"):  # which needs Horovod, and gradients as they are
        hvd.join()
    with raises(ConfigError, "sparse_as_dense=True"):
        run.step(0)
    run = make(SPARSE)
    with raises(ConfigError, "came after"):
        run.optimizer.apply([tf.ones([2])], [keras.Variable(tf.ones([2]))])
    with raises(AttributeError, "no_such_thing"):
        _ = hvd.no_such_thing
    with raises(UnsupportedError, "legacy_opts"):
        hvd_keras.load_model("model.keras", legacy_opts=True)
    for name in ("parameter_server", "AsynchronousLeaderSGD"):
        with raises(UnsupportedError, f"hvd.{name}", "hvd_compress.torch.mpi", "LocalSGD"):
            getattr(hvd, name)
    assert {"init", "rank", "allreduce", "DGC", "bind"} <= set(dir(hvd))


def distributed_optimizers_are_not_copied() -> None:
    """The error says how a plain one is had, from which a new one is made."""
    optimizer = hvd.DistributedOptimizer(sgd(0.3), compression=SPARSE)
    for copied in (
        copy.copy,
        copy.deepcopy,
        pickle.dumps,
        lambda o: type(o).from_config(o.get_config()),
    ):
        with raises(UnsupportedError, "make the plain optimizer from it"):
            copied(optimizer)
    plain = type(optimizer).__bases__[-1].from_config(optimizer.get_config())
    assert type(plain) is keras.optimizers.SGD
    assert float(np.asarray(plain.learning_rate)) == np.float32(0.3)
    hvd.DistributedOptimizer(plain, compression=SPARSE)


def nothing_stays_of_what_is_gone() -> None:
    """TensorFlow keeps graphs, and functions that they call."""
    # What other scenarios have left takes a second to look through, each time: it stays frozen.
    gc.freeze()
    for options in ({"compression": SPARSE}, {"method": hvd_keras.LocalSGD(sync_every=2)}):
        found = _used(hvd_keras.DistributedOptimizer(sgd(0.01), **options))
        for _ in range(2):
            gc.collect()
        assert [what for what, x in found.items() if x() is not None] == [], options


def _used(optimizer: Any) -> dict[str, weakref.ref]:
    """The state of a model and its optimizer after two steps: of ``fit`` if they are compressed,
    else of a graph."""
    model = model_of("mlp")
    if hasattr(optimizer, "distribution"):
        fit(optimizer, steps=2, model=model, jit_compile=False)
    else:
        step = scaled_step(model, optimizer)
        for number in range(2):
            step(*map(tf.constant, oracle.batch("mlp", hvd.rank(), number)))
    kept = {"model": model, "optimizer": optimizer, "weight": model.trainable_variables[0]}
    if binding := getattr(optimizer, "compression", None):
        kept |= {"binding": binding, **binding.store.states["0"]}
        kept |= {key: x for key, x in binding.store.scratch.items() if key == "memory"}
    return {what: weakref.ref(x) for what, x in kept.items()}
