"""Training with local steps between exchanges, in Keras 3."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import tensorflow as tf

from hvd_compress import systems
from hvd_compress.errors import ConfigError, MismatchError, UnsupportedError
from hvd_compress.systems import graphs, rounds
from tests.scenarios.driver import raises
from tests.scenarios.driver_tensorflow import hvd_keras as hvd

RATE, STEPS = 0.1, 9
W = np.linspace(-1, 1, 12).astype("float32").reshape(4, 3)
LEADERS = {"local_every": 2, "global_every": 4}
METHODS = (
    rounds.LocalSGD(sync_every=3, start=2),
    rounds.LocalSGD(sync_every=2, compression="topk:density=0.25"),
    rounds.SlowMo(sync_every=3),
    rounds.DiLoCo(sync_every=4, fragments=2, delay=1, mix=0.5),
    rounds.LeaderSGD(**LEADERS),
    rounds.LeaderSGD(**LEADERS, groups=2, average_over=3),
    rounds.EASGD(sync_every=2),
    graphs.ExactDiffusion("complete"),
    graphs.DGD("complete"),
)


def _batch(rank: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng([rank, step])
    x = random.standard_normal((8, 4)).astype("float32")
    # A target of which no two columns are as far away: top-k would choose among equals.
    return x, x @ W[::-1] ** 3 + rank


def _model() -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.set_weights([W, np.zeros(3, "float32")])
    return model


def _reference(
    method: systems.TrainingMethod,
) -> tuple[list[systems.base.Arrays], systems.Ranks]:
    """All ranks in NumPy: gradient descent on the mean square, in the lockstep world."""
    world = systems.Ranks(method, hvd.size())
    ranks = [{"0.kernel": W.copy(), "1.bias": np.zeros(3, "float32")} for _ in range(hvd.size())]
    for step in range(STEPS):
        gradients, losses = [], []
        for rank, own in enumerate(ranks):
            x, y = _batch(rank, step)
            error = x @ own["0.kernel"] + own["1.bias"] - y
            losses.append(float((error**2).mean()))
            d = 2 * error / error.size
            gradients.append({"0.kernel": x.T @ d, "1.bias": d.sum(0)})
        rates = dict.fromkeys(ranks[0], float(np.float32(RATE)))
        ranks = world.before_step(ranks, losses=losses, rates=rates)
        ranks = [
            {name: x - np.float32(RATE) * g[name] for name, x in own.items()}
            for own, g in zip(ranks, gradients, strict=True)
        ]
        ranks = world.after_step(ranks)
    return ranks, world


def _fit(model: keras.Model, optimizer, steps: range) -> None:
    batches = [_batch(hvd.rank(), step) for step in steps]
    x, y = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    model.compile(optimizer, "mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)  # so that the graph is traced once
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)


def _assert_follows(model: keras.Model, expected: dict, label) -> None:
    for x, y in zip(model.get_weights(), expected.values(), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5, err_msg=repr(label))


def fit_follows_the_lockstep_world() -> None:
    for method in METHODS:
        model = _model()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(RATE), method=method)
        _fit(model, optimizer, range(STEPS))
        ranks, world = _reference(method)
        _assert_follows(model, ranks[hvd.rank()], method)
        assert optimizer.training.step == STEPS
        assert optimizer.training.exchanges == world.exchanges
        assert optimizer.training.stats().total.bytes_sent > 0
        with optimizer.synchronized_parameters():
            _assert_follows(model, world.consensus(ranks)[hvd.rank()], method)
            everyone = hvd.allgather(tf.constant(model.get_weights()[0])[None], name="tested")
            assert (everyone.numpy() == everyone.numpy()[0]).all()
        _assert_follows(model, ranks[hvd.rank()], method)


def loops_of_ones_own_follow_it_too() -> None:
    method = rounds.LeaderSGD(**LEADERS)
    expected = _reference(method)[0][hvd.rank()]
    for graph in (False, True):
        model = _model()
        optimizer = hvd.LeaderSGD(keras.optimizers.SGD(RATE), **LEADERS)

        def step(x, y, model=model, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
            variables = model.trainable_variables
            optimizer.report(loss)
            optimizer.apply(tape.gradient(loss, [v.value for v in variables]), variables)

        run = tf.function(step) if graph else step
        for number in range(STEPS):
            run(*map(tf.constant, _batch(hvd.rank(), number)))
        _assert_follows(model, expected, graph)


def a_run_goes_on_from_its_state() -> None:
    for method in (rounds.DiLoCo(sync_every=4), rounds.EASGD(sync_every=2)):
        model = _model()
        optimizer = hvd.local_steps(keras.optimizers.SGD(RATE), method)
        _fit(model, optimizer, range(5))
        optimizer.training.consolidate()
        state, weights = optimizer.training.state_dict(), model.get_weights()
        _fit(model, optimizer, range(5, STEPS))
        other = _model()
        again = hvd.local_steps(keras.optimizers.SGD(RATE), method)
        again.training.load_state_dict(state)
        other.set_weights(weights)
        _fit(other, again, range(5, STEPS))
        for x, y in zip(model.get_weights(), other.get_weights(), strict=True):
            np.testing.assert_array_equal(x, y)


def optimizers_and_options_that_do_not_fit() -> None:
    def sgd(**options):
        return keras.optimizers.SGD(RATE, **options)

    wrapped = hvd.local_steps(sgd(momentum=0.9), hvd.LocalSGD(sync_every=2))
    assert wrapped.training.method == rounds.LocalSGD(sync_every=2)
    assert isinstance(wrapped, keras.optimizers.SGD)
    assert wrapped.momentum == 0.9
    with raises(ConfigError, "distributed already"):
        hvd.DiLoCo(wrapped)
    with raises(ConfigError, "Keras 3"):
        hvd.LocalSGD("sgd")
    with raises(UnsupportedError, "buffers='average'"):
        hvd.LocalSGD(sgd(), buffers="average")
    with raises(UnsupportedError, "loss scaling"):
        hvd.LocalSGD(keras.optimizers.LossScaleOptimizer(sgd()))
    with raises(ConfigError, "sync_every must be a whole number"):
        hvd.LocalSGD(sgd(), sync_every=0)
    used = sgd()
    used.build(_model().trainable_variables)
    with raises(ConfigError, "used already"):
        hvd.LocalSGD(used)
    model, optimizer = _model(), hvd.LeaderSGD(sgd())
    with raises(ConfigError, r"optimizer.report\(loss\)"):
        optimizer.apply([tf.zeros((4, 3)), tf.zeros(3)], model.trainable_variables)


def what_does_not_decay_alone_does_not_decay_here() -> None:
    model, adam = _model(), keras.optimizers.AdamW(RATE, weight_decay=0.5)
    adam.exclude_from_weight_decay(var_names=["kernel"])
    optimizer, (kernel, bias) = hvd.LocalSGD(adam), model.trainable_variables
    bias.assign(tf.ones(3))
    optimizer.apply([tf.zeros((4, 3)), tf.zeros(3)], [kernel, bias])
    np.testing.assert_array_equal(kernel.numpy(), W)
    np.testing.assert_allclose(bias.numpy(), 1 - RATE * 0.5, rtol=1e-6)


def loss_scaling_that_keras_adds_is_refused_too() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = _model()
    finally:
        keras.config.set_dtype_policy("float32")
    with raises(UnsupportedError, "mixed_bfloat16"):
        _fit(model, hvd.LocalSGD(keras.optimizers.SGD(RATE)), range(1))


def all_steps_are_on_the_same_variables() -> None:
    """Or the first layer's anchor would be taken for that of the second."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(4), keras.layers.Dense(4)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    optimizer = hvd.DiLoCo(keras.optimizers.SGD(RATE), sync_every=1)
    variables = model.trainable_variables
    gradients = [tf.zeros(v.shape) for v in variables]
    with raises(ValueError, "must already be built"):
        optimizer.apply(gradients)
    optimizer.apply(gradients, variables)
    before = model.get_weights()
    for chosen in (slice(2, 4), slice(None, None, -1)):
        with raises(ConfigError, "make a new optimizer"):
            optimizer.apply(gradients[chosen], variables[chosen])
    optimizer.apply(gradients)
    for x, y in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(x, y)


def a_graph_needs_the_tensor_of_its_loss() -> None:
    model, optimizer = _model(), hvd.LeaderSGD(keras.optimizers.SGD(RATE))

    @tf.function
    def step():
        optimizer.apply([tf.zeros((4, 3)), tf.zeros(3)], model.trainable_variables)

    optimizer.report(tf.constant(1.0))
    with raises(ConfigError, r"inside of the tf\.function"):
        step()


def ranks_that_begin_apart_are_told() -> None:
    model = _model()
    model.set_weights([x + hvd.rank() for x in model.get_weights()])
    optimizer = hvd.DiLoCo(keras.optimizers.SGD(RATE), sync_every=2)
    gradients = [tf.zeros(v.shape) for v in model.trainable_variables]
    optimizer.apply(gradients, model.trainable_variables)
    if hvd.size() > 1:
        with raises(MismatchError, "weights at the start", "BroadcastGlobalVariablesCallback"):
            optimizer.apply(gradients, model.trainable_variables)


def nan_that_is_pulled_back_does_not_come_again() -> None:
    model = _model()
    optimizer = hvd.EASGD(keras.optimizers.SGD(RATE, momentum=0.9), sync_every=2)
    for number in range(8):
        is_spoilt = number == 2 and hvd.rank() == hvd.size() - 1
        gradient = np.nan if is_spoilt else 1.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if number == 3 else "error")
            gradients = [gradient + tf.zeros(v.shape) for v in model.trainable_variables]
            optimizer.apply(gradients, model.trainable_variables)
    assert all(np.isfinite(x).all() for x in model.get_weights())


def a_round_that_nan_has_lost_does_not_lose_those_after_it() -> None:
    for graph in (False, True):
        model = _model()
        sgd = keras.optimizers.SGD(RATE, momentum=0.9)
        optimizer = hvd.DiLoCo(sgd, sync_every=2, outer=hvd.OuterSGD(1.0, 0.0, False))

        def step(x, model=model, optimizer=optimizer):
            gradients = [x + tf.zeros(v.shape) for v in model.trainable_variables]
            optimizer.apply(gradients, model.trainable_variables)

        run, found = tf.function(step) if graph else step, []
        for number in range(8):
            is_spoilt = number == 2 and hvd.rank() == hvd.size() - 1
            with warnings.catch_warnings():
                warnings.simplefilter("error" if number > 3 else "ignore")
                run(tf.constant(np.nan if is_spoilt else 1.0))
            found.append(model.get_weights()[0])
        np.testing.assert_array_equal(found[3], found[1])
        assert (found[5] < found[3]).all()
        assert (found[7] < found[5]).all()


def options_of_gradients_are_refused() -> None:
    with raises(ConfigError, "compression='topk' and method=", "leave compression out"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), compression="topk", method=hvd.LocalSGD())
