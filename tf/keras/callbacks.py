"""Callbacks for ``model.fit``, for Keras 3 and tf_keras: Horovod's names, and one more."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
from tensorflow import keras

from hvd_compress.agreement import by_rank
from hvd_compress.config import check_between, check_choice, check_whole, is_number
from hvd_compress.errors import ConfigError, MismatchError

from ..distribute import is_tf_keras
from ..optimizer import KerasCompressedOptimizer, inner_of
from ..runtime import check_device
from ..slots import native, variables_of_both

_Callback: TypeAlias = keras.callbacks.Callback


def _is_number(x: Any) -> bool:
    return is_number(x) or isinstance(x, np.number)


class _OverRanks:
    """Mixed into callbacks whose work is done by collectives."""

    @property
    def _hvd(self) -> Any:
        """``horovod.tensorflow``, or in subclasses another module with its functions."""
        return importlib.import_module("horovod.tensorflow")


class CompressionCallback(_Callback):
    """Make what rank 0 saves complete, and announce epochs to schedules::

        model.fit(data, epochs=10, callbacks=[hvd.callbacks.CompressionCallback(), save_on_rank_0])

    At the end of each epoch every rank gets the mean of the residuals.  Parameters that differ
    between ranks for some steps (``ZeroOneAdam``) are synchronized then, and before a validation.

    Must stand before ``ModelCheckpoint``, on every rank; validate on all ranks, or on none.

    Args:
        consolidate: whether to average residuals at the end of an epoch.

    Raises:
        ConfigError: training starts with an optimizer that is not of this package.
        MismatchError: at the end of an epoch, a rank had fewer batches than the others.

    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> sgd = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=hvd.TopK(density=0.5))
    >>> model.compile(sgd, "mse", run_eagerly=True)
    >>> x, y, announce = np.ones((4, 2)), np.ones((4, 1)), CompressionCallback()
    >>> history = model.fit(x, y, epochs=3, verbose=0, callbacks=[announce])
    >>> float(sgd.compression.epoch)  # of the last one, from 0
    2.0
    """

    def __init__(self, consolidate: bool = True) -> None:
        super().__init__()
        self._consolidate = consolidate

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if optimizer := self._optimizer():
            optimizer.set_compression_epoch(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._consolidate and (optimizer := self._optimizer()):
            self._synchronize()
            optimizer.compression.consolidate()

    def on_test_begin(self, logs: Any = None) -> None:
        self._synchronize()

    def _synchronize(self) -> None:
        if synchronize := getattr(self._optimizer(), "synchronize_parameters", None):
            synchronize()

    def _optimizer(self) -> KerasCompressedOptimizer | None:
        """Return the optimizer, or ``None`` if it is Horovod's own, which keeps nothing."""
        optimizer = self.model.optimizer
        if not isinstance(optimizer, KerasCompressedOptimizer):
            if is_tf_keras(optimizer) and hasattr(optimizer, "register_local_var"):
                return None
            raise ConfigError(
                "CompressionCallback needs an optimizer made by hvd.DistributedOptimizer of "
                "hvd_compress.tensorflow.keras"
            )
        return optimizer


class BroadcastGlobalVariablesCallback(_OverRanks, _Callback):
    """Gives all ranks the weights and the optimizer's variables of ``root_rank``.

    Variables that exist when training starts are sent then; those that the first batch makes are
    sent after it.

    Args:
        root_rank: whose values all take over.
        device: where the broadcast is computed, as for ``tf.device``.
        local_variables: a variable of the model, or several, that keep what their rank has.  The
            optimizer's variables that belong to them are sent like all others, as by Horovod.

    Raises:
        ConfigError: ``local_variables`` has something else in it.
        MismatchError: the ranks have other numbers of variables.

    >>> model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="zeros")])
    >>> model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    >>> x, y, send = np.ones((4, 2)), np.ones((4, 1)), BroadcastGlobalVariablesCallback(root_rank=0)
    >>> model.fit(x, y, verbose=0, callbacks=[send]).history["loss"]
    [1.0]
    """

    def __init__(self, root_rank: int = 0, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        check_whole("root_rank", root_rank, 0)
        check_device("device", device)
        self.root_rank = root_rank
        self._device = device
        self._sent: set[int] = set()
        self._local: set[int] = set()
        self._rounds = 0
        for variable in tf.nest.flatten([] if local_variables is None else local_variables):
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Exclude this variable of the model from the broadcast."""
        if isinstance(var, type) or not hasattr(var, "assign"):
            raise ConfigError(f"local_variables must be variables; got {type(var).__name__}")
        self._local.add(id(native(var)))

    def on_train_begin(self, logs: Any = None) -> None:
        self._send_once(0)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._send_once(1)

    def _send_once(self, number: int) -> None:
        if self._rounds != number:
            return
        self._rounds += 1
        model, optimizer = self.model, self.model.optimizer
        if model.built and hasattr(optimizer, "build"):  # as it is where a checkpoint was loaded
            optimizer.build(model.trainable_variables)
        variables = variables_of_both(model, optimizer)
        new = [v for v in variables if id(v) not in self._sent | self._local]
        with tf.device(self._device):
            self._compare(len(new))
            if new:
                self._hvd.broadcast_variables(new, self.root_rank)
            if (binding := getattr(optimizer, "compression", None)) is not None:
                binding.broadcast(self.root_rank)
        self._sent.update(map(id, new))

    def _compare(self, count: int) -> None:
        counts = self._hvd.allgather(tf.constant([count])).numpy().tolist()
        if len(set(counts)) > 1:
            lines = by_rank(f"{count} variables" for count in counts)
            what = "not all ranks have as many variables to broadcast:"
            advice = (
                "Build the same model on all ranks before fit: model.build(input_shape), or "
                "keras.Input as its first layer"
            )
            raise MismatchError("\n".join([what, *lines, advice]))


class MetricAverageCallback(_OverRanks, _Callback):
    """Replaces metrics by their averages over the ranks, at the end of an epoch.

    It must stand before callbacks that read metrics: ``ReduceLROnPlateau``, ``TensorBoard``.  All
    ranks must have the same metrics: validate on all of them, or on none.

    Args:
        device: where the averages are computed, as for ``tf.device``.

    Raises:
        MismatchError: a rank had fewer batches than the others, and an optimizer of this package.

    >>> logs = {"loss": 0.5}  # what Keras hands to callbacks
    >>> MetricAverageCallback().on_epoch_end(0, logs)
    >>> logs
    {'loss': 0.5}
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        check_device("device", device)
        self._device = device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if not logs:
            return
        optimizer = getattr(self.model, "optimizer", None)
        for owner in ("compression", "training"):
            if (found := getattr(optimizer, owner, None)) is not None:
                found.meet(f"{type(self).__name__} in epoch {epoch}")
        names = sorted(name for name, value in logs.items() if np.ndim(value) == 0)
        values = tf.constant([float(logs[name]) for name in names], tf.float64)
        means = self._hvd.allreduce(
            values, op=self._hvd.Average, name="hvd_compress.metrics", device_dense=self._device
        )
        logs.update(zip(names, means.numpy().tolist(), strict=True))


class LearningRateScheduleCallback(_Callback):
    """Sets the learning rate to ``initial_lr`` times a multiplier, from ``start_epoch`` to
    ``end_epoch``.

    Args:
        initial_lr: for multiplier 1.
        multiplier: a function of the epoch, or a factor for every epoch after ``start_epoch``.
        start_epoch, end_epoch: of the schedule; the end is exclusive.
        staircase: the rate changes at the beginning of an epoch; otherwise with every batch, and
            the epoch is a fraction.
        momentum_correction: scale the velocities of an SGD that have the learning rate in them
            (Goyal et al., section 2.1).  Momentum inside the exchange needs none.
        steps_per_epoch: taken from ``fit`` where it knows.

    Raises:
        ConfigError: there is no ``initial_lr``, or nobody knows ``steps_per_epoch``.

    Reference: Goyal et al., 2017, arXiv 1706.02677.

    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    >>> drop = LearningRateScheduleCallback(initial_lr=0.1, multiplier=0.5)
    >>> history = model.fit(np.ones((4, 2)), np.ones((4, 1)), epochs=3, verbose=0, callbacks=[drop])
    >>> [round(rate, 3) for rate in history.history["lr"]]
    [0.1, 0.05, 0.025]
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if not _is_number(initial_lr):
            raise ConfigError(
                f"initial_lr={initial_lr!r}: pass the learning rate that the multiplier scales"
            )
        if isinstance(multiplier, type) or not (callable(multiplier) or _is_number(multiplier)):
            raise ConfigError(
                f"multiplier={multiplier!r}: a number, or a function of the epoch that returns one"
            )
        check_between("start_epoch", start_epoch, 0)
        if end_epoch is not None:
            check_between("end_epoch", end_epoch, 0)
        if steps_per_epoch is not None:
            check_whole("steps_per_epoch", steps_per_epoch, 1)
        self.initial_lr = initial_lr
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.epoch = 0
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            factor = float(multiplier)
            self.multiplier = lambda epoch: factor ** (epoch - start_epoch)

    def on_train_begin(self, logs: Any = None) -> None:
        if self.steps_per_epoch is None and not self.staircase:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise ConfigError("fit() does not know steps_per_epoch: pass it to this callback")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        after_end = self.end_epoch is not None and self.epoch >= self.end_epoch
        if self.epoch < self.start_epoch or after_end:
            return
        if self.staircase and batch == 0:
            self._adjust(self.epoch)
        elif not self.staircase:
            self._adjust(self.epoch + batch / self.steps_per_epoch)  # type: ignore[operator]

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = float(np.asarray(self.model.optimizer.learning_rate))

    def _adjust(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        old = float(np.asarray(optimizer.learning_rate))
        new = self.initial_lr * self.multiplier(epoch)
        if new == old:
            return
        optimizer.learning_rate = new
        inner = inner_of(optimizer)
        if self.momentum_correction and old > 0:
            for velocity in getattr(inner, "momentums", None) or []:
                if type(inner).__name__ == "SGD":
                    velocity.assign(native(velocity).value() * (new / old))


class LearningRateWarmupCallback(_OverRanks, LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr / size`` to ``initial_lr`` in ``warmup_epochs``,
    batch by batch.

    Args:
        initial_lr: the rate for all ranks together, as a rule that of one rank times their number
            (Goyal et al., 2017).
        warmup_epochs: how many it takes; 0 for none.
        momentum_correction, steps_per_epoch: as for :class:`LearningRateScheduleCallback`, whose
            errors these are, too.
        verbose: whether rank 0 prints a line when it is over.

    >>> warmup = LearningRateWarmupCallback(initial_lr=0.4, warmup_epochs=5, steps_per_epoch=100)
    >>> warmup.multiplier(0)  # one rank alone has its own rate from the beginning
    1.0
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        check_between("warmup_epochs", warmup_epochs, 0)

        def multiplier(epoch: float) -> float:
            if self.steps_per_epoch:  # the last batch of the warm-up has the whole rate
                epoch += 1 / self.steps_per_epoch
            size = self._hvd.size()
            return (epoch * (size - 1) / warmup_epochs + 1) / size if warmup_epochs else 1.0

        super().__init__(
            initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        is_over = self.end_epoch is not None and epoch == self.end_epoch - 1
        if self.verbose and is_over and self._hvd.rank() == 0:
            rate = float(np.asarray(self.model.optimizer.learning_rate))
            print(f"\nEpoch {epoch + 1}: warm-up is over, learning rate {rate:g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Saves the model whenever ``monitor`` is better than ever before.

    Like every ``ModelCheckpoint`` it saves on each rank that has it, so give it to rank 0 alone.
    It stands after ``MetricAverageCallback`` and ``CompressionCallback``, which all ranks have.

    Args:
        monitor, verbose, save_weights_only, mode, save_freq: as for ``ModelCheckpoint``.
        filepath: where to, ``"best.keras"`` or ``"best.weights.h5"`` for instance.  Horovod's has
            no such option: as there, the attribute may be set before training instead.

    Raises:
        ConfigError: training starts, and there is no file to save to.

    >>> best = BestModelCheckpoint(monitor="val_loss", filepath="best.keras")
    >>> best.save_best_only, best.filepath
    (True, 'best.keras')
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
        filepath: Any = None,
    ) -> None:
        check_choice("save_weights_only", save_weights_only, (False, True))
        # Keras looks at the ending right away.
        later = "best.weights.h5" if save_weights_only else "best.keras"
        super().__init__(
            later if filepath is None else filepath,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        if filepath is None:
            self.filepath = None

    def on_train_begin(self, logs: Any = None) -> None:
        if self.filepath is None:
            raise ConfigError(
                "BestModelCheckpoint knows no file: BestModelCheckpoint(filepath='best.keras'), or "
                "set its filepath before fit()"
            )
        super().on_train_begin(logs)


class BestWholeModelCheckpoint(BestModelCheckpoint):
    """The ``BestModelCheckpoint`` of ``horovod.keras``, which saves whole models only."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: Any = "epoch",
        filepath: Any = None,
    ) -> None:
        super().__init__(monitor, verbose, False, mode, save_freq, filepath)


#: those that Horovod has under the same names
OF_HOROVOD = {
    cls.__name__: cls
    for cls in (
        BestModelCheckpoint,
        BroadcastGlobalVariablesCallback,
        LearningRateScheduleCallback,
        LearningRateWarmupCallback,
        MetricAverageCallback,
    )
}


def __getattr__(name: str) -> Any:
    """Return a name of Horovod's callbacks that this module does not replace."""
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(importlib.import_module("horovod.tensorflow.keras.callbacks"), name)
