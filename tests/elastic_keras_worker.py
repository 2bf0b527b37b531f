"""Elastic training with Keras, of a job that grows from one worker to three, loses one, and gets
another.  Rank 0 says which hosts there are; what a host is, is in the test."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow import keras

import hvd_compress.tensorflow.keras as hvd

#: workers, and the steps before rank 0 asks for another number of them
SIZES, STEPS = [1, 2, 3, 2, 3], 3
folder, *after = map(Path, sys.argv[1:])
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
state = hvd.elastic.KerasState(model, epoch=0, batch=0, step=0, stage=-1, until=0)
committed: list[np.ndarray] = []  # this worker's residual; a new one has none


def residual() -> np.ndarray:
    return optimizer.compression.store.states["0"]["residual"].numpy()


def note(**fields) -> None:
    with (folder / f"{os.getpid()}").open("a") as log:
        print(json.dumps(fields | {"rank": hvd.rank(), "size": hvd.size()}), file=log)


def gathered(array: np.ndarray, name: str) -> np.ndarray:
    return np.asarray(hvd.allgather(array[None], name=name))


class Steps(keras.callbacks.Callback):
    """Counts them before they are committed, and brings about what a stage ends with."""

    def on_train_batch_begin(self, batch, logs=None):
        if state.step < state.until:
            return
        time.sleep(0.2)  # until others are there
        if state.stage == 2 and os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1":
            time.sleep(2)  # Horovod may wait for ever if it is just then that others submit
            note(event="dies", step=state.step)
            os.kill(os.getpid(), signal.SIGKILL)
        if hvd.rank() == 0 and state.stage < len(after) and after[state.stage].exists():
            after[state.stage].replace(folder / "hosts")
        if state.stage == len(SIZES) - 1:
            self.model.stop_training = True

    def on_train_batch_end(self, batch, logs=None):
        state.step += 1
        committed[:] = [residual()]


@hvd.elastic.run
def train(state):
    # All start from one set of variables, and from the mean residual of those who have one.
    everything = np.concatenate([residual(), *(w.reshape(-1) for w in model.get_weights())])
    assert (gathered(everything, "everything") == everything).all()
    had = gathered(np.float64([bool(committed)]), "had")
    before = gathered(committed[0] if committed else np.zeros_like(residual()), "before")
    if state.step:
        np.testing.assert_allclose(residual(), before.sum(0) / had.sum(), 1e-5, 1e-7)
        assert np.abs(residual()).sum() > 0
    state.stage += 1
    state.until = state.step + STEPS
    note(event="starts", step=state.step, stage=state.stage, had=int(had.sum()))
    random = np.random.default_rng(hvd.rank())
    x = random.normal(size=(8 * 10_000, 40)).astype("float32")
    callbacks = [Steps(), hvd.elastic.CommitStateCallback(state)]
    model.fit(x, x[:, :5].argmax(1), batch_size=8, verbose=0, callbacks=callbacks)
    weights = np.concatenate([w.reshape(-1) for w in model.get_weights()])
    assert (gathered(weights, "weights") == weights).all()
    note(event="done", step=state.step, exchanges=int(optimizer.compression.step))


train(state)
