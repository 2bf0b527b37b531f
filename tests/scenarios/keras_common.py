"""The terms that ranks must have in common, what a gradient that is missing counts, and graphs of
TensorFlow 1, which are refused."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_compress import DGC, FP16, TopK
from hvd_compress.agreement import SAMPLED_EVERY
from hvd_compress.errors import CompressionError, ConfigError, UnsupportedError
from hvd_compress.tensorflow.keras import callbacks
from tests.scenarios import applies
from tests.scenarios.doors import problems, quietly
from tests.scenarios.driver import barrier, raises
from tests.scenarios.driver_tensorflow import hvd, hvd_keras, traced

METHOD = TopK(density=0.5)


@applies(least=2)
def numbers_of_the_optimizer_that_differ_are_an_error() -> None:
    """In the first step; rates, which users may broadcast until then, in the next."""
    one, variable = hvd.rank() == 1, keras.Variable(np.ones(20, "float32"))
    for own, step, *words in (
        (
            keras.optimizers.SGD(0.1, momentum=0.9 if one else 0.8, weight_decay=0.1 + one),
            *(0, "momentum", "weight_decay"),
        ),
        (keras.optimizers.Adam(0.1, beta_1=0.9 if one else 0.8), 0, "beta_1"),
        (hvd_keras.LAMB(0.1, beta_2=0.9 if one else 0.8), 0, "beta_2"),
        (
            keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1 + one, 100)),
            *(1, "learning_rate"),
        ),
    ):
        optimizer = hvd_keras.DistributedOptimizer(own, compression=METHOD)
        with raises(tf.errors.OpError, "optimizer", *words):
            for _ in range(2):
                optimizer.apply([tf.ones([20])], [variable])
        barrier()
        assert int(optimizer.compression.step) == step


@applies(least=2)
def a_rate_that_differs_is_an_error_in_the_next_step() -> None:
    """One that changes on all ranks alike is none, nor is what says nothing of a step."""
    rank, variable = hvd.rank(), keras.Variable(np.ones(20, "float32"))
    optimizer = hvd_keras.DistributedOptimizer(
        keras.optimizers.Adam(0.1, name=f"of_rank_{rank}"), compression=METHOD
    )
    optimizer.build([variable])
    step = traced(lambda: optimizer.apply([tf.ones([20])], [variable]))
    for number in range(SAMPLED_EVERY + 2):
        optimizer.learning_rate = 0.1 / (1 + number)
        step()
    if rank == 0:
        optimizer.learning_rate = 0.01
    with raises(tf.errors.OpError, "MismatchError", "learning_rate = 0.00999", "ReduceLROnPlateau"):
        step()
    barrier()
    assert int(optimizer.compression.step) == SAMPLED_EVERY + 2


@applies(least=2)
def weights_that_differ_are_an_error_within_some_steps() -> None:
    """A tape knows no optimizer; rounding alone is none."""
    variable = tf.Variable(tf.fill([20], 1.0 + 1e-6 * hvd.rank()))
    compression = hvd.bind(FP16, [variable])

    @traced
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable)
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        variable.assign_sub(0.001 * tape.gradient(loss, [variable])[0])

    for number in range(2 * SAMPLED_EVERY):
        if number == SAMPLED_EVERY + 1:
            variable.assign_add(tf.fill([20], 0.1 * hvd.rank()))
        step()
    with raises(tf.errors.OpError, "MismatchError", "weights", "broadcast_variables"):
        step()
    barrier()
    assert int(compression.step) == 2 * SAMPLED_EVERY


def gradients_that_all_ranks_lack_stay_away() -> None:
    """Nothing is exchanged for them, and what waits goes on waiting; a step moves the others."""
    a, b = (keras.Variable(np.zeros(20, "float32"), name=name) for name in "ab")
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=METHOD)
    gradient = tf.range(1.0, 21.0)
    optimizer.apply([gradient, gradient], [a, b])
    before, waits = b.numpy(), optimizer.compression.store.states["1"]["residual"].numpy()
    assert np.any(waits)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras says that there is none
        optimizer.apply([gradient, None], [a, b])
    np.testing.assert_array_equal(b.numpy(), before)
    np.testing.assert_array_equal(optimizer.compression.store.states["1"]["residual"], waits)
    tape_a, tape_b = tf.Variable(1.0), tf.Variable(1.0)
    with tf.GradientTape() as tape:
        loss = 3.0 * tape_a
    tape = hvd.DistributedGradientTape(tape, compression=FP16)
    found = tape.gradient(loss, [tape_a, tape_b])
    assert float(found[0]) == 3.0
    assert found[1] is None


@applies(least=2)
def gradients_that_some_ranks_lack_are_an_error() -> None:
    """For a tape and for an optimizer; as zeros of the tape's own they count as zero."""
    has = hvd.rank() == 0
    variables = [keras.Variable(np.zeros(20, "float32"), name=name) for name in "ab"]
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=FP16)
    with raises(tf.errors.OpError, "with gradients"):
        optimizer.apply([tf.ones(20), tf.ones(20) if has else None], variables)
    barrier()
    a, b = tf.Variable(1.0), tf.Variable(1.0)

    def tape_of(compression: Any) -> tuple[Any, tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = 3.0 * a + (6.0 * b if has else 0.0)
        return hvd.DistributedGradientTape(tape, compression=compression), loss

    tape, loss = tape_of(hvd.bind(FP16, [a, b], seed=1))
    with raises(tf.errors.OpError, "with gradients"):
        tape.gradient(loss, [a, b])
    barrier()
    tape, loss = tape_of(hvd.bind(FP16, [a, b], seed=2))
    zeros = tf.UnconnectedGradients.ZERO
    found = tape.gradient(loss, [a, b], unconnected_gradients=zeros)
    np.testing.assert_allclose(found, [3.0, 6.0 / hvd.size()], rtol=1e-3)


@applies(least=2)
def options_that_make_other_messages_are_an_error() -> None:
    """A rank would wait for messages that the others never send."""
    one, shapes = hvd.rank() == 1, {"rows": (10, 4), "whole": (20,)}
    variables = [keras.Variable(np.zeros(x, "float32"), name=name) for name, x in shapes.items()]
    rows = tf.IndexedSlices(tf.ones([2, 4]), tf.constant([0, 3]), tf.constant([10, 4]))
    options = {"groups": int(one), "sparse_as_dense": one, "backward_passes_per_step": 1 + one}
    optimizer = hvd_keras.DistributedOptimizer(
        keras.optimizers.SGD(0.1), compression=METHOD, **options
    )
    with raises(tf.errors.OpError, "MismatchError", *options, "float32 of rows"):
        for _ in range(1 + one):
            optimizer.apply([rows, tf.ones([20])], variables)
    barrier()


@applies(least=2)
def what_one_rank_alone_saves_counts_no_binding() -> None:
    """The number of a binding is part of the names of its collectives."""
    first, second = (hvd.bind(METHOD, [tf.Variable(tf.ones([20]))]) for _ in range(2))
    if hvd.rank() == 0:
        first.serialize()
    for binding in (second, first):
        np.testing.assert_array_equal(binding.reduce([tf.ones([20])])[0], [1.0] * 10 + [0.0] * 10)


def graphs_of_tensorflow_1_are_refused() -> None:
    """With what to write, before anything is exchanged, with a state and without."""
    v1, variable = tf.compat.v1, tf.Variable(tf.zeros([100]))
    bound = hvd.bind(METHOD, [variable])
    words = "enable_eager_execution", "tf.function", "hvd.Compression"
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [100])
        unknown = v1.placeholder(tf.float32, [None])
        own = v1.get_variable("own", [100])
        for method in (METHOD, FP16, "none"):
            for doing in (
                lambda method=method: hvd.allreduce(x, name="x", compression=method),
                lambda method=method: hvd.allreduce(x, compression=method),
                lambda method=method: hvd.allreduce(unknown, name="y", compression=method),
                lambda method=method: hvd.grouped_allreduce([x], name="z", compression=method),
                lambda method=method: hvd.bind(method, [own]),
                lambda method=method: _tape_gradient(own, method),
                lambda method=method: v1.cond(
                    tf.constant(True),
                    lambda: hvd.allreduce(x, name="x", compression=method),
                    lambda: x,
                ),
            ):
                with raises(UnsupportedError, *words):
                    doing()
        with raises(UnsupportedError, *words):
            bound.reduce([x])
        with raises(UnsupportedError, "tf.compat.v1", "keras.optimizers", "hvd.Compression"):
            hvd.DistributedOptimizer(v1.train.AdamOptimizer(0.1), compression=METHOD)
        with raises(UnsupportedError, *words):
            hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=METHOD)
    np.testing.assert_allclose(hvd.allreduce(tf.ones([4]), compression=FP16), np.ones(4))


def _tape_gradient(variable: Any, method: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable * variable)
    return hvd.DistributedGradientTape(tape, compression=method).gradient(loss, [variable])


#: what no public door takes, whatever it is for
_STRANGE: tuple[Any, ...] = (None, 3, "x", object(), [None], {"a": 1}, b"\0", -1.5, int, [[]])


def wrong_kinds_are_errors_of_the_package() -> None:
    """No door lets an error of its own inner frames out."""
    variable = tf.Variable(tf.ones([4]))

    def bind(**options: Any) -> Any:
        return hvd.bind(**{"compression": METHOD, "variables": [variable], **options})

    def gradient(**options: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable)
        tape = hvd.DistributedGradientTape(**{"gradtape": tape, "compression": METHOD, **options})
        tape.gradient(loss, [variable])

    def partial(**options: Any) -> None:
        sgd = keras.optimizers.SGD(0.1)
        hvd_keras.PartialDistributedOptimizer(sgd, compression=METHOD, **options)

    binding, optimizer = bind(), keras.optimizers.SGD(0.1)
    doors: dict[Callable[..., Any], tuple[str, ...]] = {
        bind: (
            *("compression", "variables", "op", "groups", "seed", "process_set", "momentum"),
            *("gradient_predivide_factor", "device_dense", "no_such_option"),
        ),
        gradient: ("gradtape", "seed"),
        functools.partial(hvd.DistributedGradientTape, tf.GradientTape()): ("compression",),
        _distributed: (
            *("compression", "op", "groups", "process_set", "backward_passes_per_step"),
            "gradient_predivide_factor",
        ),
        partial: ("local_layers",),
        functools.partial(hvd.DistributedOptimizer, compression=METHOD): ("optimizer",),
        functools.partial(hvd.allreduce, tf.ones([4]), compression=METHOD): ("name",),
        binding.set_epoch: ("epoch",),
        binding.load_values: ("arrays",),
        lambda x: bind().reduce([x]): ("x",),
        hvd_keras.DistributedOptimizer(optimizer, compression=METHOD).register_local_var: (
            "variable",
        ),
    }
    wrong = {}
    for door, options in doors.items():
        for option, x in itertools.product(options, _STRANGE):
            try:
                door(**{option: x})
            except CompressionError:
                pass
            except Exception as error:
                wrong[f"{door}({option}={x!r})"] = f"{type(error).__name__}: {error}"[:150]
    assert not wrong, "\n".join(f"{k}: {v}" for k, v in wrong.items())


def wrong_kinds_for_callbacks_and_models() -> None:
    right = {"initial_lr": lambda: 0.1, "multiplier": lambda: 0.5, "filepath": lambda: "none.keras"}

    def collect() -> list[str]:
        names = ["CompressionCallback", *callbacks.OF_HOROVOD]
        doors = {name: getattr(hvd_keras.callbacks, name) for name in names}
        doors |= {"load_model": hvd_keras.load_model}
        return [x for name, door in doors.items() for x in problems(name, lambda d=door: d, right)]

    quietly(collect)


def steps_that_are_discarded_leave_no_trace() -> None:
    """As after a spike of the norm: eagerly, and by a condition of the graph."""
    for method, in_graph in ((DGC(density=0.2, momentum=0.9, min_size=8), True), ("onebit", False)):
        states = []
        for spikes in ((), (0, 2)):
            variables = [tf.Variable(tf.reshape(tf.range(24.0), [4, 6])), tf.Variable([1.0, 2])]
            compression = hvd.bind(method, variables)
            compression.keep_undo()

            def step(factor: Any, own: Any = variables, compression: Any = compression) -> None:
                with tf.GradientTape() as tape:
                    loss = sum(tf.reduce_sum(tf.sin(v * factor)) for v in own) * factor
                tape = hvd.DistributedGradientTape(tape, compression=compression)
                averages = tape.gradient(loss, own)

                def applied() -> None:
                    for v, average in zip(own, averages, strict=True):
                        v.assign_sub(0.1 * average)

                tf.cond(factor < 50.0, applied, compression.discard)

            run = traced(step) if in_graph else step
            for number in range(4):
                if number in spikes:
                    run(tf.constant(100.0 + hvd.rank()))
                run(tf.constant(1.0 + hvd.rank() + number))
            states.append([v.numpy() for v in (*variables, *compression.store.entries().values())])
            assert int(compression.step) == 4
        for one, other in zip(*states, strict=True):
            np.testing.assert_array_equal(one, other)


def only_what_was_kept_can_be_discarded() -> None:
    variable = tf.Variable([1.0, 2.0])
    compression = hvd.bind(METHOD, [variable])
    with raises(ConfigError, "compression.keep_undo()"):
        compression.discard()
    for after in (
        compression.keep_undo,
        lambda: compression.load_values(compression.values()),
        compression.consolidate,
        compression.discard,
    ):
        compression.reduce([tf.ones([2])])
        after()
        with raises(ConfigError, "there is no step to discard"):
            compression.discard()
    with raises(tf.errors.InvalidArgumentError, "there is no step to discard"):
        tf.function(compression.discard)()


def _distributed(**options: Any) -> Any:
    options = {"compression": METHOD, **options}
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), **options)
    optimizer.build([keras.Variable(np.ones(4, "float32"))])
    return optimizer
