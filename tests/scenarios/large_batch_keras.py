"""LARS, LAMB and SAM in Keras 3, beside a reference in this process."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.scenarios import oracle
from tests.scenarios.driver import assert_close, assert_same_everywhere
from tests.scenarios.driver_tensorflow import hvd as hvd_tf
from tests.scenarios.driver_tensorflow import hvd_keras as hvd
from tests.scenarios.driver_tensorflow import model_of

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
STEPS = 5


def _weights(model) -> dict[str, np.ndarray]:
    return dict(zip(oracle.initial_weights("mlp"), model.get_weights(), strict=True))


def _batches(rank: int):
    return [tuple(map(tf.constant, oracle.batch("mlp", rank, step))) for step in range(STEPS)]


def _gradient(model, x, y, sam=None):
    variables = model.trainable_variables

    def loss():
        return LOSS(y, model(x, training=True))

    if sam is not None:
        return sam.gradient(loss, variables)[1]
    with tf.GradientTape() as tape:
        value = loss()
    return tape.gradient(value, [v.value for v in variables])


def _train(model, optimizer, sam=None) -> None:
    optimizer.build(model.trainable_variables)  # so that the graph is traced once

    @tf.function
    def step(x, y):
        optimizer.apply(_gradient(model, x, y, sam), model.trainable_variables)

    for x, y in _batches(hvd.rank()):
        step(x, y)


def _reference(model, optimizer, sam=None) -> None:
    ranks = [_batches(rank) for rank in range(hvd.size())]
    for batches in zip(*ranks, strict=True):
        found = [_gradient(model, x, y, sam) for x, y in batches]
        means = [tf.add_n(list(g)) / hvd.size() for g in zip(*found, strict=True)]
        optimizer.apply(means, model.trainable_variables)


def each_rank_climbs_on_its_own_and_one_gradient_travels() -> None:
    plain = model_of("mlp")
    beside = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, 0.9), compression=hvd.NoCompression)
    _train(plain, beside)
    sam, model, reference = hvd.SAM(0.1), model_of("mlp"), model_of("mlp")
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1, 0.9), compression=hvd.NoCompression
    )
    _train(model, optimizer, sam)
    _reference(reference, keras.optimizers.SGD(0.1, 0.9), sam)
    assert_close(_weights(model), _weights(reference), 1e-4, 1e-5)
    assert_same_everywhere(_weights(model))
    sent = [o.compression.stats().total.bytes_sent for o in (optimizer, beside)]
    assert sent[0] == sent[1] > 0


def averaged_first_all_ranks_climb_to_one_point() -> None:
    model, reference = model_of("mlp"), model_of("mlp")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=hvd.NoCompression)
    _train(model, optimizer, hvd.SAM(0.1, average=hvd_tf.allreduce))
    alone, sam = keras.optimizers.SGD(0.1), hvd.SAM(0.1)
    for batches in zip(*[_batches(rank) for rank in range(hvd.size())], strict=True):
        x, y = (tf.concat(parts, 0) for parts in zip(*batches, strict=True))
        alone.apply(_gradient(reference, x, y, sam), reference.trainable_variables)
    assert_close(_weights(model), _weights(reference), 1e-4, 1e-5)
    assert_same_everywhere(_weights(model))


def steps_of_lars_and_lamb_are_those_on_the_average() -> None:
    for make in (
        lambda: hvd.LARS(2.0, weight_decay=0.01, trust_coefficient=0.01),
        lambda: hvd.LAMB(0.01, weight_decay=0.1),
    ):
        model, reference = model_of("mlp"), model_of("mlp")
        _train(model, hvd.DistributedOptimizer(make(), compression=hvd.NoCompression))
        _reference(reference, make())
        assert_close(_weights(model), _weights(reference), 1e-4, 1e-5)


def fit_trains_with_compression() -> None:
    class WithSAM(keras.Sequential):
        sam = hvd.SAM(0.05)

        def train_step(self, data):
            x, y = data
            variables = self.trainable_variables
            loss, gradients = self.sam.gradient(
                lambda: self.compute_loss(x, y, self(x, training=True)), variables
            )
            self.optimizer.apply(gradients, variables)
            return {"loss": loss}

    rate = hvd.ScaledWarmup(0.01, batch_size=64, reference_batch_size=16, steps=8)
    x, y = map(
        np.concatenate, zip(*(oracle.batch("mlp", hvd.rank(), s) for s in range(12)), strict=True)
    )
    for local in (keras.optimizers.SGD(rate, 0.9), hvd.LARS(rate, trust_coefficient=0.5)):
        plain = model_of("mlp")
        model = WithSAM(plain.layers)
        model.compile(hvd.DistributedOptimizer(local, compression="topk:density=0.2"), loss=LOSS)
        model.optimizer.build(model.trainable_variables)
        before = float(LOSS(y, model(x)))
        model.fit(x, y, batch_size=8, shuffle=False, epochs=5, verbose=0)
        assert float(LOSS(y, model(x))) < 0.95 * before
        assert_same_everywhere(_weights(model))
