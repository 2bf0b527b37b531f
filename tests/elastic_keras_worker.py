"""Elastic training with Keras; the worker on the second host kills itself in mid-training."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import hvd_compress.tensorflow.keras as hvd

EPOCHS, STEPS, LAST_BEFORE = 3, 4, 5
folder = Path(sys.argv[1])
tf.config.threading.set_inter_op_parallelism_threads(2)
tf.config.threading.set_intra_op_parallelism_threads(1)
hvd.init()
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(64), keras.layers.Dense(5)])
optimizer = hvd.DistributedOptimizer(
    keras.optimizers.SGD(0.05, momentum=0.9), compression=hvd.DGC(density=0.05)
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer, loss=loss)
state = hvd.elastic.KerasState(model, epoch=0, batch=0, step=0)


def everything() -> np.ndarray:
    residual = optimizer.compression.states["0"]["residual"].numpy()
    return np.concatenate([residual, *(w.reshape(-1) for w in model.get_weights())])


def note(**fields) -> None:
    with (folder / f"{os.getpid()}").open("a") as log:
        print(json.dumps(fields | {"rank": hvd.rank(), "size": hvd.size()}), file=log)


class Steps(keras.callbacks.Callback):
    """Counts them, before they are committed; and the death of a worker."""

    def on_train_batch_begin(self, batch, logs=None):
        if state.step == LAST_BEFORE and os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1":
            note(event="dies", step=state.step)
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, batch, logs=None):
        state.step += 1


@hvd.elastic.run
def train(state):
    if state.step:  # a new set of workers: all start from one mean residual
        mine = everything()
        everyones = hvd.allgather(mine[None], name="everything")
        assert (np.asarray(everyones) == mine).all()
        assert np.abs(optimizer.compression.states["0"]["residual"].numpy()).sum() > 0
        note(event="resumed", step=state.step)
    random = np.random.default_rng(hvd.rank())
    while state.epoch < EPOCHS:
        x = random.normal(size=(8 * STEPS, 40)).astype("float32")
        callbacks = [
            Steps(),
            hvd.elastic.CommitStateCallback(state),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
        ]
        model.fit(x, x[:, :5].argmax(1), batch_size=8, verbose=0, callbacks=callbacks)
    weights = np.concatenate([w.reshape(-1) for w in model.get_weights()])
    assert (np.asarray(hvd.allgather(weights[None], name="weights")) == weights).all()
    note(event="done", step=state.step, exchanges=int(optimizer.compression.step))


train(state)
