"""The state of a binding: how it is saved, and the one way back from wherever it comes.

A state comes back from a file of Keras or of ``tf.train.Checkpoint``, from a copy in memory, from
other ranks, or from a plain optimizer.  All of these end in :meth:`BindingState.restore`, which
checks everything before it assigns any.

Keras saves an optimizer's attributes that can be saved, each in a place of its own.  On loading it
looks for those that it knows only.  A plain optimizer finds its own variables, and does not notice
these.
"""

from __future__ import annotations

import abc
import io
import json
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from operator import attrgetter
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from hvd_compress.agreement import BETWEEN
from hvd_compress.engines.base import Engine
from hvd_compress.errors import ConfigError
from hvd_compress.reduce.state_file import (
    StateHeader,
    averaged,
    entry,
    lost,
    read_header,
    refused,
    restored,
    unconsolidated,
)

from .runtime import Common, Runtime
from .store import VariableStore, copy_of, variable

#: the name of the array that holds the header, as JSON in bytes
HEADER = "header"


class BindingState(tf.train.experimental.PythonState):
    """The state of a binding, and its base class.  In all forms it has a header, and entries by
    flat names: the number of the slot, and the key.

    Attributes:
        store: the variables that hold it.
        consolidate_call, serves_all: the call that gives all ranks the same, and whether they have
            it.
        on_behalf: others whose messages count here as well.
    """

    #: of the bindings that have a number, by the ranks of their process set; ``None``: all ranks
    _counts: ClassVar[Counter[tuple[int, ...] | None]] = Counter()
    _number: int | None = None

    store: VariableStore
    _runtime: Runtime
    _set: Any

    def __init__(self) -> None:
        self.on_behalf: list[Any] = []
        self._undo: list[tuple[tf.Variable, tf.Variable]] = []  # (what a step changes, its copy)
        self.consolidate_call = "compression.consolidate()"
        self.serves_all: Callable[[], bool] = lambda: self.is_consolidated
        self.forget_graphs()

    @property
    @abc.abstractmethod
    def engine(self) -> Engine: ...

    # To be read only: whoever writes one means a call, such as set_epoch.
    method = property(attrgetter("store.method"), doc="The compressor in use.")
    seed = property(attrgetter("store.seed"), doc="The seed of randomness that the ranks share.")
    step = property(attrgetter("store.step"), doc="The number of exchanges so far.")
    epoch = property(attrgetter("store.epoch"), doc="The epoch announced, -1 if none was.")

    @property
    def number(self) -> int:
        """The number of this binding among those of its ranks, by its first collective.  Those come
        in the same order on all of these ranks, and nothing else does."""
        if self._number is None:
            ranks = self._ranks()
            self._number = self._counts[ranks]
            self._counts[ranks] += 1
        return self._number

    def _ranks(self) -> tuple[int, ...] | None:
        everyone = self._set is self._runtime.hvd.global_process_set
        return None if everyone else tuple(self._set.ranks)

    def prefix(self) -> str:
        """Return how names of this binding's collectives begin, which it is about to make:
        variables of two models may have the same names."""
        return f"hvd_compress.{self.number}"

    def meet(self, call: str) -> None:
        """Raise ``MismatchError`` unless all ranks are about to make this call, a collective
        between steps; one that has more batches is in a step."""
        if self.engine.size > 1:
            self._runtime.agreement(Common({BETWEEN: call}, {}), self.prefix(), self._set)

    def forget_graphs(self) -> None:
        """Trace new graphs, since the number of ranks is another one from now on."""
        self._traced_means = tf.function(self._means, autograph=False)

    # -- ranks that get the same -------------------------------------------------------------

    def consolidate(self) -> None:
        """Give every rank the mean of the entries that differ between ranks.  The mean residual is
        kept, and any number of ranks can load a checkpoint of one rank.

        This is a collective: call it on every rank before rank 0 saves.
        """
        self.forget_undo()
        self.store.consolidated_at.assign(self.store.step)
        differing = self.store.differing()
        for name, mean in self.average(differing).items():
            differing[name].assign(mean)

    def average(self, own: Mapping[str, Any], what: str = "mean") -> dict[str, Any]:
        """Return the means of arrays over the ranks, by names that are the same on all ranks; a
        collective.  ``what`` tells one call's names from another's."""
        if self.engine.size == 1 or not own:
            return dict(own)
        self.meet(f"average of {len(own)} arrays ({what})")
        arrays = [tf.convert_to_tensor(x) for x in own.values()]
        return dict(zip(own, self._traced_means(what, tuple(own), arrays), strict=True))

    def _means(self, what: str, names: tuple[str, ...], arrays: list[Any]) -> list[Any]:
        size, engine = self.engine.size, self._runtime.engine(self._set, 1.0, self.prefix, None)

        def mean_of(name: str, x: tf.Tensor) -> Generator[Any, Any, Any]:
            return {name: (yield from averaged(x, size))}  # as of a bucket of one tensor

        for name, x in zip(names, arrays, strict=True):
            engine.start(f"{what}.{name}", mean_of(name, tf.reshape(x, [-1])))
        found = {name: x for part in engine.finish().values() for name, x in part.items()}
        pairs = zip(names, arrays, strict=True)
        return [tf.reshape(found[name].mean, x.shape) for name, x in pairs]

    @property
    def is_consolidated(self) -> bool:
        """Whether what this rank has is what all have."""
        alone = self.engine.size == 1 or not self.store.differing()
        return alone or bool(self.store.consolidated_at == self.store.step)

    def broadcast(self, root_rank: int = 0) -> None:
        """Give all ranks the state of ``root_rank`` if they have come to different steps, because
        not all have loaded a checkpoint.  Entries that differ between ranks become the mean over
        the ranks; those at other steps have nothing.  This is a collective."""
        for binding in self.on_behalf:
            binding.broadcast(root_rank)
        if self.engine.size == 1:
            return
        hvd = self._runtime.hvd
        own = tf.stack([self.store.step.value(), tf.cast(self.is_consolidated, tf.int64)])
        steps = hvd.allgather(own[:1], process_set=self._set).numpy()
        if len(set(steps.tolist())) == 1:
            return
        step, serves_all = hvd.broadcast(own, root_rank, process_set=self._set).numpy()
        if not serves_all and hvd.rank() == root_rank:
            warnings.warn(lost(f"{sum(steps == step)} of {len(steps)} ranks"), stacklevel=2)
        self._share(
            {} if serves_all else self.store.differing(), self.store.step == step, root_rank
        )

    def unite(self) -> None:
        """Give all ranks the state of rank 0.  Entries that differ between ranks become the mean
        over those that have made a step, since in an elastic run new ranks have no residual. A
        collective."""
        if self.engine.size == 1:
            return
        hvd = self._runtime.hvd
        # Those who come later have counted fewer.
        numbers = tf.constant([self.number, self._counts[self._ranks()]])
        numbers = hvd.broadcast(numbers, 0, name="hvd_compress.numbers")
        self._number, self._counts[self._ranks()] = map(int, numbers)
        has_begun = self.store.step > 0
        part = hvd.allreduce(
            tf.cast(has_begun, tf.float64), op=hvd.Average, name="hvd_compress.has_begun"
        )
        self._share(self.store.differing(), has_begun, 0, part)

    def _share(
        self, differing: Mapping[str, tf.Variable], counts: Any, root_rank: int, part: Any = 1.0
    ) -> None:
        """Restore the root's state on all ranks.  Entries that differ become the sum over the ranks
        that count, divided by the number of all ranks and by ``part``; a collective."""
        # Multiplied by 0, a NaN would stay one.
        own = {name: tf.where(counts, x, tf.zeros_like(x)) for name, x in differing.items()}
        entries = {
            name: tf.math.divide_no_nan(mean, tf.cast(part, mean.dtype))
            for name, mean in self.average(own).items()
        }
        store = self.store
        common = {name: x for name, x in store.entries().items() if name not in entries}
        sent = [
            tf.Variable(x, trainable=False, name=x.name.removesuffix(":0"))
            for x in (store.step, store.epoch, *common.values())
        ]
        self._runtime.hvd.broadcast_variables(sent, root_rank, self._set)
        step, epoch, *others = [x.value() for x in sent]
        header = self.header(step, epoch, consolidated=True)
        self.restore(header, {**entries, **dict(zip(common, others, strict=True))})

    # -- the step before ---------------------------------------------------------------------

    def keep_undo(self) -> None:
        """Keep the states of before each exchange from now on, for :meth:`discard`.  They take as
        much memory once more, and the time to copy them.  Call it on all ranks, before the first
        step: a ``tf.function`` that was traced before keeps nothing."""
        if self._undo:
            return
        with tf.init_scope():
            for x in (self.store.step, *self.store.entries().values()):
                copy = variable(copy_of(x), f"before.{x.name.removesuffix(':0')}")
                self._undo.append((x, copy))
            self.forget_undo()
        self.forget_graphs()

    @tf.autograph.experimental.do_not_convert
    def discard(self) -> None:
        """Undo the last exchange, whose averages are not applied: states and the number of the step
        are those of before.  Call it on all ranks alike, eagerly or in a graph:

            compression = hvd.bind(hvd.TopK, variables)
            compression.keep_undo()  # once, before training
            ...
            averages = tape.gradient(loss, variables)
            if tf.linalg.global_norm(averages) < 100:
                optimizer.apply_gradients(zip(averages, variables))
            else:
                compression.discard()

        Raises:
            ConfigError: :meth:`keep_undo` was not called, or there is no exchange to discard; in a
                graph as a text in TensorFlow's ``InvalidArgumentError``.
        """
        if not self._undo:
            raise ConfigError(
                "to discard a step takes the states of before it: call compression.keep_undo() "
                "once, before the first step"
            )
        message = (
            "there is no step to discard: none has been exchanged since the last one was discarded "
            "or loaded, or its tf.function was traced before compression.keep_undo()"
        )
        step, before = self._undo[0]
        if tf.executing_eagerly() and before + 1 != step:
            raise ConfigError(message)
        check = tf.debugging.assert_equal(before + 1, step, f"ConfigError: {message}")
        with tf.control_dependencies([] if check is None else [check]):
            for x, old in self._undo:
                x.assign(old, read_value=False)
            self.forget_undo()

    def forget_undo(self) -> None:
        """Take the averages of the last step for used: it cannot be discarded any more."""
        for _, before in self._undo[:1]:
            before.assign(-1, read_value=False)

    # -- forms of the state ------------------------------------------------------------------

    def header(self, step: Any = None, epoch: Any = None, *, consolidated: bool) -> StateHeader:
        """Return the header of the state at a step and an epoch; those of now if ``None``."""
        store, engine = self.store, self.engine
        epoch = float(store.epoch if epoch is None else epoch)
        return StateHeader(
            store.method.to_config(),
            int(store.step if step is None else step),
            engine.rank,
            engine.size,
            consolidated,
            None if epoch < 0 else epoch,
            store.seed,
        )

    def kept(self) -> tuple[StateHeader, dict[str, tf.Tensor]]:
        """Return a copy of the state of this rank."""
        header = self.header(consolidated=self.is_consolidated)
        entries = self.store.entries()
        return header, {name: copy_of(x) for name, x in entries.items()}

    def values(self) -> dict[str, Any]:
        """Return all state as NumPy arrays, by flat names."""
        with tf.init_scope():
            header, entries = self.kept()
            arrays = {name: x.numpy() for name, x in entries.items()}
        text = json.dumps(header.saved()).encode()
        # NumPy's files do not know bfloat16.
        return {HEADER: np.frombuffer(text, np.uint8)} | {
            name: x if x.dtype.kind == "f" else x.astype(np.float32) for name, x in arrays.items()
        }

    def load_values(self, arrays: Mapping[str, Any]) -> None:
        """Take up what :meth:`values` gave, on this rank or on another.

        Raises:
            ConfigError: it belongs to another model, or it is damaged; then nothing has changed.
        """
        if not isinstance(arrays, Mapping) or not all(isinstance(name, str) for name in arrays):
            raise refused(f"it is {type(arrays).__name__} where a dict of arrays was expected")
        text = entry(arrays, HEADER, np.ndarray).tobytes()
        try:
            own = json.loads(text)
        except (ValueError, RecursionError):
            raise refused(f"{HEADER!r} is no text in JSON") from None
        saved = read_header(own)
        if saved.seed != (here := self.store.seed):
            raise refused(
                f"it is of seed={saved.seed}, and graphs are made with seed={here} here: pass "
                f"seed={saved.seed} to hvd.DistributedOptimizer, hvd.bind or "
                "hvd.DistributedGradientTape"
            )
        entries = {name: x for name, x in arrays.items() if name != HEADER}
        with tf.init_scope():  # a checkpoint may have waited for a step that is traced now
            self.restore(saved, entries, saved.share(self.engine))

    def restore(self, saved: StateHeader, entries: Mapping[str, Any], factor: float = 1.0) -> None:
        """Take up a state, by whichever way it came.

        Args:
            saved: its header.
            entries: arrays or eager tensors by flat names.  Missing ones begin again;
                entries that the method has no use for are dropped.
            factor: this rank's share of entries that differ between ranks.

        Raises:
            ConfigError: an entry does not fit, or it is damaged; then nothing has changed.
        """
        store = self.store
        found: dict[str, dict[str, Any]] = {i: {} for i in store.states}
        for name, x in entries.items():
            place, _, key = name.partition(".")
            if place not in found:
                raise refused(f"{name!r} fits no variable: it belongs to another model")
            found[place][key] = x
        dropped: dict[str, list[str]] = {}
        states = []
        for i, slot in enumerate(store.slots):
            fresh, common = store.initial(i)
            state, unused = restored(
                slot.name,
                store.method_for(slot),
                tf.zeros(slot.shape, slot.dtype),
                found[str(i)],
                fresh=fresh,
                common=common,
                more={},
                per_rank=store.per_rank(slot),
                factor=factor,
                kinds=(np.ndarray, tf.Tensor),
                place=lambda x, like: tf.cast(tf.reshape(x, like.shape), like.dtype),
            )
            states.append({**fresh, **common, **state})
            for key in unused:
                dropped.setdefault(key, []).append(slot.name)
        if dropped:
            texts = (f"{key!r} of {len(of)} ({of[0]} ...)" for key, of in dropped.items())
            warnings.warn(
                f"{store.method.name} has no use for {', '.join(texts)} in a state of "
                f"{saved.method['method']}: dropped",
                stacklevel=2,
            )
        store.step.assign(saved.step)
        store.epoch.assign(-1 if saved.epoch is None else saved.epoch)
        for i, state in enumerate(states):
            for key, x in state.items():
                store.states[str(i)][key].assign(x)
        store.consolidated_at.assign(saved.step if saved.consolidated else -1)
        self.forget_undo()

    # -- files -------------------------------------------------------------------------------

    def serialize(self) -> bytes:
        """Return what ``tf.train.Checkpoint`` and Keras save; ``tf.saved_model.save`` leaves it
        out."""
        if not tf.executing_eagerly():
            return b""
        if self.engine.size > 1 and not self.serves_all():
            warnings.warn(unconsolidated(self.consolidate_call), stacklevel=2)
        file = io.BytesIO()
        np.savez(file, **self.values())
        return file.getvalue()

    def deserialize(self, string_value: bytes) -> None:
        """Restore what :meth:`serialize` returned."""
        if not string_value:
            return
        try:
            with np.load(io.BytesIO(string_value), allow_pickle=False) as file:
                arrays = dict(file)
        except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise refused(f"it is no file of arrays ({error})") from error
        self.load_values(arrays)


def state_on_disk(binding: BindingState) -> Any:
    """Return an object that Keras saves, and which holds the state of the binding."""
    import keras

    class StateOnDisk(keras.layers.Layer):
        """A layer, since Keras lets layers define how they are saved; it computes nothing."""

        def save_own_variables(self, store: Any) -> None:
            store["state"] = np.frombuffer(binding.serialize(), np.uint8)

        def load_own_variables(self, store: Any) -> None:
            names = sorted(store.keys())
            if names:  # else it was saved by a plain optimizer
                if "state" not in names:
                    raise refused(f"its file has {names} in place of 'state'")
                binding.deserialize(np.asarray(store["state"]).tobytes())

    return StateOnDisk(name="compression_on_disk")
