"""Training methods in Keras 3: under ``fit``, eagerly, from a state, and what is refused."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_compress.errors import ConfigError, MismatchError, UnsupportedError
from hvd_compress.systems import rounds
from tests.scenarios import applies, oracle
from tests.scenarios.driver import assert_close, make, raises, train
from tests.scenarios.driver_tensorflow import hvd_keras as hvd
from tests.scenarios.driver_tensorflow import model_of
from tests.scenarios.keras_fit import fit, weights_of


def _sgd(**options: Any) -> Any:
    return keras.optimizers.SGD(oracle.LR, **options)


def fit_takes_the_steps_of_an_eager_loop() -> None:
    """It reports the loss, by which this method chooses; steps of graphs follow the lockstep
    world."""
    method = rounds.LeaderSGD(local_every=2, global_every=4)
    run, model = make(None, method=method, momentum=0.0), model_of("mlp")
    run.graph = run._step
    optimizer = hvd.DistributedOptimizer(_sgd(), method=method)
    fit(optimizer, model=model, steps=9, jit_compile=False)
    assert_close(weights_of(model), train(run, range(9)).weights(), 1e-5, 1e-6)


def a_run_goes_on_from_its_state() -> None:
    for method in (rounds.DiLoCo(sync_every=4), rounds.EASGD(sync_every=2)):
        run, other = (make(None, method=method, momentum=0.0) for _ in range(2))
        for each in (run, other):
            each.graph = each._step
        train(run, range(5)).optimizer.training.consolidate()
        other.optimizer.training.load_state_dict(run.optimizer.training.state_dict())
        other.set_weights(run.weights())
        for each in (run, other):
            train(each, range(5, 9))
        assert_close(other.weights(), run.weights(), 0, 0)


@applies(least=2)
def a_rank_that_took_fewer_steps_is_an_error() -> None:
    """It synchronizes, and the others are in a step that begins with another exchange."""
    method = rounds.LeaderSGD(local_every=2, global_every=2)
    optimizer = hvd.DistributedOptimizer(_sgd(), method=method)
    variable = keras.Variable(np.ones(20, "float32"))
    optimizer.build([variable])
    with raises(MismatchError, "the parameters that are to be tested", "a step", "fewer batches"):
        for _ in range(4 if hvd.rank() else 3):
            optimizer.report(tf.constant(1.0))
            optimizer.apply([tf.ones([20])], [variable])
        optimizer.synchronize_parameters()


def optimizers_and_options_that_do_not_fit() -> None:
    def local(optimizer: Any, sync_every: int = 2, **options: Any) -> Any:
        return hvd.DistributedOptimizer(optimizer, method=hvd.LocalSGD(sync_every), **options)

    wrapped, leader = (
        local(_sgd(momentum=0.9)),
        hvd.DistributedOptimizer(_sgd(), method=hvd.LeaderSGD()),
    )
    assert wrapped.training.method == rounds.LocalSGD(sync_every=2)
    assert isinstance(wrapped, keras.optimizers.SGD)
    assert wrapped.momentum == 0.9
    used, model, half = _sgd(), model_of("mlp"), model_of("mlp", "mixed_float16")
    used.build(model.trainable_variables)
    zeros = [tf.zeros(v.shape) for v in model.trainable_variables]
    scaled = keras.optimizers.LossScaleOptimizer(_sgd())

    def step() -> None:
        leader.apply(zeros, model.trainable_variables)

    for error, call, *words in (
        (ConfigError, lambda: local(wrapped), "distributed already"),
        (ConfigError, lambda: local("sgd"), "Keras 3"),
        (ConfigError, lambda: local(used), "used already"),
        (ConfigError, lambda: local(_sgd(), 0), "sync_every must be a whole"),
        (UnsupportedError, lambda: local(scaled), "loss scaling"),
        (UnsupportedError, lambda: fit(local(_sgd()), model=half, steps=1), "mixed_bfloat16"),
        (
            *(ConfigError, lambda: local(_sgd(), compression="topk")),
            *("compression='topk' and method=", "leave compression out"),
        ),
        (ConfigError, step, r"optimizer.report\(loss\)"),
    ):
        with raises(error, *words):
            call()
    leader.report(tf.constant(1.0))
    with raises(ConfigError, r"inside of the tf\.function"):
        tf.function(step)()


def all_steps_are_on_the_same_variables() -> None:
    """Or the first layer's anchor would be taken for that of the second."""
    variables = [keras.Variable(np.full(4, float(n), "float32")) for n in range(4)]
    optimizer = hvd.DistributedOptimizer(_sgd(), method=hvd.DiLoCo(sync_every=1))
    gradients = [tf.zeros(4)] * 4
    with raises(ValueError, "must already be built"):
        optimizer.apply(gradients)
    optimizer.apply(gradients, variables)
    for chosen in (slice(2, 4), slice(None, None, -1)):
        with raises(ConfigError, "make a new optimizer"):
            optimizer.apply(gradients[chosen], variables[chosen])
    optimizer.apply(gradients)
    for n, variable in enumerate(variables):
        np.testing.assert_array_equal(variable.numpy(), np.full(4, n))
