"""Train a convolutional network on real scans with Keras, dense and compressed.

    python -m mpi_examples.train_digits_keras
    python -m mpi_examples.train_digits_keras --compression dgc topk --density 0.01 --epochs 10
    python -m mpi_examples.train_digits_keras --over mpi
    horovodrun -np 16 -H node1:8,node2:8 python -m mpi_examples.train_digits_keras

The same job as in train_digits.py.  The lines that turn ``model.fit`` into compressed data-parallel
training are marked with (1) to (4)."""
# ruff: noqa: E402  A process that is no rank need not load TensorFlow.

from __future__ import annotations

import time

import numpy as np
from tqdm import tqdm

from hvd_compress.launch import under_horovodrun, under_mpirun
from mpi_examples.data import digits
from mpi_examples.demo import compare, horovod_parser, parse, rate_of
from mpi_examples.report import Run

parser = horovod_parser(__doc__, "results/digits.png", epochs=30, seeds=3)
parser.add_argument("--over", choices=["horovod", "mpi"], default="horovod")
options = parse(parser)
if options.over == "mpi":
    under_mpirun(options.ranks)
else:
    under_horovodrun(options.ranks, options.controller)

import keras
import tensorflow as tf
from keras import layers

# (1) Everything of horovod.tensorflow.keras, plus the compressors; or the same without Horovod.
if options.over == "mpi":
    import hvd_compress.tensorflow.keras.mpi as hvd
else:
    import hvd_compress.tensorflow.keras as hvd


def cnn() -> keras.Model:
    """That of models.py, with 1.08 million parameters."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(1024, activation="relu"),
            layers.Dense(10),
        ]
    )


def train(method: str, seed: int, bar: tqdm) -> Run:
    """One run; the returned record means something on rank 0."""
    keras.utils.set_random_seed(seed)
    x, x_test, y, y_test = digits(seed)
    x, x_test = (np.moveaxis(images, 1, -1) for images in (x, x_test))  # channels are last here
    batches = len(x) // hvd.size() // options.batch_size
    if not batches:
        raise SystemExit("no full batch for each rank: use a smaller --batch-size")
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=seed)
    data = data.shard(hvd.size(), hvd.rank()).batch(options.batch_size, drop_remainder=True)
    model = cnn()

    warmup = max(options.warmup_epochs * batches, 1)
    rate = keras.optimizers.schedules.CosineDecay(
        0.1 * options.lr * rate_of(method),
        max(options.epochs * batches - warmup, 1),
        warmup_target=options.lr * rate_of(method),
        warmup_steps=warmup,
    )
    sgd = keras.optimizers.SGD(rate, momentum=0.9, nesterov=True, weight_decay=1e-4)
    # (2) The compressor takes the optimizer's momentum over and corrects it.
    optimizer = hvd.DistributedOptimizer(sgd, compression=options.methods[method])
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    run = Run(method, seed)
    start = time.perf_counter()
    model.fit(
        data.take(batches),
        epochs=options.epochs,
        shuffle=False,  # the data set does it
        verbose=0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            # (3) The density of the warm-up goes by epochs.
            hvd.callbacks.CompressionCallback(),
            Record(run, (x_test, y_test), bar),
        ],
    )
    run.seconds = time.perf_counter() - start
    return run


class Record(keras.callbacks.Callback):
    """Losses of all steps; on rank 0 the accuracy and the bytes sent so far after each epoch."""

    def __init__(self, run: Run, test: tuple[np.ndarray, np.ndarray], bar: tqdm) -> None:
        super().__init__()
        self.run, self.test, self.bar = run, test, bar
        self.sum = 0.0

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.sum = 0.0

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        total = (batch + 1) * logs["loss"]  # Keras shows the mean since the epoch began
        self.run.losses.append(total - self.sum)
        self.sum = total

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        if hvd.rank() > 0:
            return
        x, y = self.test
        found = np.concatenate(
            [self.model.predict_on_batch(part) for part in np.array_split(x, -(-len(x) // 512))]
        )
        score = 100 * float((found.argmax(1) == y).mean())
        # (4) Exact bytes, counted from the messages.
        self.run.end_epoch(score, self.model.optimizer.compression.stats(), self.bar)


if __name__ == "__main__":
    hvd.init()
    title = f"scikit-learn's digits with Keras over {options.over}, {hvd.size()} ranks, "
    title += f"{options.epochs} epochs"
    compare(train, options, hvd.rank(), title)
