"""A training method on one rank: what it does around local steps."""

from __future__ import annotations

import functools
import socket
from collections import deque
from collections.abc import Callable, Container, Generator, Iterable, Mapping
from typing import Any, TypeVar

from hvd_compress.agreement import BETWEEN, Terms, listed
from hvd_compress.backends import backend_of
from hvd_compress.base import Array
from hvd_compress.config import is_number
from hvd_compress.engines.base import Engine, asking
from hvd_compress.errors import ConfigError
from hvd_compress.reduce import MemoryStore, Reducer
from hvd_compress.reduce.state_file import check_array, entry, refused
from hvd_compress.stats import Stats
from hvd_compress.systems.base import (
    WEIGHTS_AT_START,
    Arrays,
    Finish,
    Mean,
    Request,
    Start,
    StepContext,
    TrainingMethod,
    Unsent,
    all_finite,
    as_training_method,
    residuals,
)
from hvd_compress.systems.owner import Owner

T = TypeVar("T")
#: the key, in a checkpoint, of averages that have come in and were not used yet
_ARRIVED = "arrived"
#: how ranks call the averages between steps
_TO_BE_TESTED = "the parameters that are to be tested"
#: the record of messages that belong to no single parameter
_COMMON = "(all)"


class Coordinator(Owner):
    """Runs a training method on this rank, over an engine, around the local step of a loop::

        x = coordinator.before_step(x)
        x = {name: x[name] - lr * gradients[name] for name in x}  # gradients of the x before
        x = coordinator.after_step(x)

    All ranks take equally many steps, since those with an exchange are collectives.

    Args:
        method: a training method, such as ``DiLoCo(sync_every=100)``.
        engine: carries the exchanges, for instance :class:`hvd_compress.mpi.MpiEngine`.
        seed: the seed of random numbers that the ranks share.
        like: an array of the kind in which ranks compare values; ``None``: that of the parameters.

    >>> from hvd_compress.engines.local import LocalEngine
    >>> x, coordinator = {"w": np.ones(3)}, Coordinator(LocalSGD(sync_every=2), LocalEngine())
    >>> for _ in range(4):
    ...     x = coordinator.after_step({"w": coordinator.before_step(x)["w"] - 0.1})
    >>> coordinator.step, coordinator.exchanges
    (4, 2)
    """

    def __init__(
        self,
        method: TrainingMethod | type[TrainingMethod],
        engine: Engine,
        *,
        seed: int = 0,
        like: Array = None,
    ) -> None:
        self.method = method = as_training_method(method)
        method.check_ranks(engine.size)
        super().__init__("training", like)
        self._losses: deque[Any] = deque(maxlen=max(method.loss_window, 1))
        self._reported = 0  # the step whose loss came last
        self._shapes: dict[str, tuple[int, ...]] | None = None
        self._start: list[str] | None = None  # of a state that no ranks have compared yet
        self._rates: Mapping[str, float] = {}
        self._consolidated: tuple[int, dict[str, Any]] | None = None
        self._has_begun = False  # before_step was called and after_step was not
        self._is_in_flight = False  # averages are
        self._arrived: Arrays = {}  # averages that came in before the method asked for them
        self._sent = _SentStore(self, like)
        self.reducer = Reducer(
            method.compression, engine, store=self._sent, seed=seed, same_order=True
        )
        self.reducer.method.bind(self.reducer)

    @property
    def engine(self) -> Engine:  # type: ignore[override]
        return self.reducer.engine

    # -- steps -------------------------------------------------------------------------------

    def report(self, loss: Any) -> None:
        """Tell the loss of this rank's batch, before :meth:`before_step`, for methods that choose
        by it.  An array of one element is looked at only when ranks meet."""
        self._losses.append(loss)
        self._reported = self.step + 1

    def before_step(
        self, parameters: Arrays, *, rates: Mapping[str, float] | None = None
    ) -> Arrays:
        """Run what the method does between the computation of gradients and the local step.

        Args:
            parameters: the trained parameters by name, in the same order on all ranks; those that
                are trained no longer are handed to :meth:`freeze` first.
            rates: see :class:`~hvd_compress.systems.base.StepContext`.

        Returns:
            The parameters to step from; those that stay as they are, are the same objects.

        Raises:
            ConfigError: the method needs a loss, and none was reported.
        """
        self._follow(parameters)
        if self.method.loss_window and self._reported != self.step + 1:
            raise ConfigError(
                f"{type(self.method).__name__} chooses by the training loss: call report(loss) in "
                "every step before the step is taken, or pass a closure to optimizer.step()"
            )
        if self.method.needs_rates and rates is None:
            raise ConfigError(f"{type(self.method).__name__} needs the learning rates: pass rates=")
        self._rates = rates or {}
        self._has_begun = True
        return self._stepped(self.method.before_step, parameters)

    def after_step(self, parameters: Arrays) -> Arrays:
        """Run what the method does after the local step; see :meth:`before_step`."""
        if not self._has_begun:
            raise ConfigError("call before_step(parameters) before the local step")
        result = self._stepped(self.method.after_step, parameters)
        self.step += 1
        self._has_begun = False
        if self._is_in_flight:
            self.engine.poll()
        return result

    def consensus(self, parameters: Arrays) -> Arrays:
        """Return the parameters that are to be tested, the same on all ranks.  A collective; the
        method's state stays as it is."""
        self._follow(parameters)
        return self._driven(self.method.consensus(parameters, self.state), is_step=False)

    def freeze(self, parameters: Arrays) -> Arrays:
        """Return the values that parameters keep when they are trained no longer: those that would
        be tested, the same on all ranks.  A collective, to be called before the first step without
        them.

        Their part of the method's state, such as an anchor, and of the compression's residuals is
        forgotten, since others may change them meanwhile.
        """
        self.bring_in()
        result = self._driven(self.method.consensus(parameters, self.state), is_step=False)
        self.state = {key: _without(parameters, arrays) for key, arrays in self.state.items()}
        self._arrived = _without(parameters, self._arrived)
        self._sent.forget(parameters)
        self._shapes = _without(parameters, self._shapes or {})
        self._consolidated = None
        return result

    def set_epoch(self, epoch: float) -> None:
        """Announce the epoch, for compressions with schedules by epoch."""
        self.reducer.set_epoch(epoch)

    def stats(self) -> Stats:
        """Return the exact bytes so far, by parameter and in total; ``steps`` are exchanges."""
        found = self.reducer.stats()
        if not self.record.bytes_sent + self.record.bytes_received:
            return found
        return Stats({**found.layers, _COMMON: self.record}, found.times)

    def _follow(self, parameters: Arrays) -> None:
        """Make a state for parameters that are new."""
        shapes = _shapes_of(parameters)
        if shapes == self._shapes:
            return
        fresh = self.method.init(parameters)
        if self.method.state_is_own and any(x.keys() != shapes.keys() for x in self.state.values()):
            self.state = {}
        for key, arrays in fresh.items():
            own = self.state.setdefault(key, {})
            for name, x in arrays.items():
                if name not in own:
                    own[name] = x
                elif backend_of(own[name]).shape(own[name]) != shapes[name]:
                    raise ConfigError(
                        f"{name!r} has shape {shapes[name]}, and {key!r} of the training method "
                        f"{backend_of(own[name]).shape(own[name])}: it is of another model"
                    )
        self._shapes, self._start = shapes, self.method.in_common(self.state)

    def _stepped(self, function: Callable[..., Any], parameters: Arrays) -> Arrays:
        context = StepContext(
            self.step + 1,
            self.engine.rank,
            self.engine.size,
            tuple(self._losses) if self.method.loss_window else (),
            self._rates,
            socket.gethostname(),
            self._like,
        )
        result, self.state = self._driven(function(parameters, self.state, context))
        return result

    # -- exchanges ---------------------------------------------------------------------------

    def _driven(self, steps: Generator[Request, Any, Any], is_step: bool = True) -> Any:
        reply, has_met, has_met_plainly = None, False, False
        while True:
            try:
                request = steps.send(reply)
            except StopIteration as stop:
                self.exchanges += has_met and is_step
                self.record.steps += has_met_plainly and is_step
                return stop.value
            has_met |= not isinstance(request, Finish | Unsent)
            has_met_plainly |= not isinstance(request, Start | Finish | Unsent)
            reply = self._answer(request, {} if is_step else {BETWEEN: _TO_BE_TESTED})

    def _answer(self, request: Request, more: dict[str, Any]) -> Any:
        if isinstance(request, Start):
            self.reducer.step = request.round
            try:
                self.reducer.start_together(request.arrays)
            except BaseException:  # the next step may begin an exchange all the same
                self.reducer.abandon()
                raise
            self._is_in_flight = True
            return None
        self.bring_in()  # an engine finishes all that is in flight
        if isinstance(request, Finish):
            # Nothing, if it would have begun before a restart, or has not with other options.
            found, self._arrived = self._arrived, {}
            if not all_finite(found):  # nor is there a use for what was left of it
                self._sent.forget(found)
            return found
        if isinstance(request, Unsent):
            return residuals(request.arrays, self._sent.states)
        record, before = self.record, self.record.bytes_sent
        if isinstance(request, Mean):
            shapes = [(name, backend_of(x).shape(x)) for name, x in request.arrays.items()]
            self._agree(**{"average of": listed(shapes)}, **more)
            reply = self.reducer.average(request.arrays)
            sent = sum(int(x.nbytes) for x in request.arrays.values())
            record.bytes_sent += sent
            record.bytes_received += sent if self.engine.size > 1 else 0
        else:
            self._agree(**more)
            reply = self._ask(asking(request))
        self._start = None
        record.dense_bytes += record.bytes_sent - before
        return reply

    def bring_in(self) -> None:
        """Wait for averages that are in flight, before the method asks for them."""
        if self._is_in_flight:
            self._arrived, self._is_in_flight = self.reducer.finish(), False
            self._start = None

    def terms(self) -> Terms:
        rates = sorted(self._rates.items()) if self.method.needs_rates else []
        starts = {WEIGHTS_AT_START: self._start} if self._start else {}
        return {
            "training": repr(self.method),
            "local step": str(self.step + 1),
            "learning rates": [f"{name} {rate}" for name, rate in rates],
            "parameters": listed((self._shapes or {}).items()),
            **starts,
        }

    # -- checkpoints -------------------------------------------------------------------------

    def consolidate(self) -> None:
        """Prepare a :meth:`state_dict` that every rank may load: wait for what is under way, and
        average the residuals of the compression.  This is a collective."""
        self.bring_in()
        self._consolidated = self.step, self.reducer.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: arrays by name and key, and plain numbers.

        All ranks may load the part that ranks have in common.  The rest is this rank's own: the
        entries ``method.per_rank``, the losses, and residuals without :meth:`consolidate`.  Only
        the same rank of as many may load it.

        Raises:
            ConfigError: an exchange is under way.
        """
        if self._is_in_flight:
            raise ConfigError(
                "an exchange is under way: call consolidate_state_dict() on every rank before "
                "state_dict()"
            )
        step, compression = self._consolidated or (None, {})
        is_mean = step == self.step
        if not is_mean:
            compression = self.reducer.state_dict(consolidate=False)
        return self._saved(
            {**self.state, **({_ARRIVED: self._arrived} if self._arrived else {})},
            is_mean,
            training=self.method.to_config(),
            losses=[float(loss) for loss in self._losses],
            compression=compression,
        )

    def restart(self) -> None:
        """Forget the method's state, and what was not sent yet: the next step begins a first
        round."""
        self.reducer.abandon()
        self._sent.forget(list(self._sent.states))
        self.state, self._is_in_flight, self._arrived = {}, False, {}
        self._shapes, self._start, self._consolidated = None, None, None

    def load_state_dict(
        self, state_dict: Mapping[str, Any], parameters: Arrays | None = None
    ) -> None:
        """Restore what :meth:`state_dict` returned.

        Args:
            parameters: those that it has to fit, by name; ``None`` for those of the last step.

        Raises:
            ConfigError: it was made by another method or version, or for another model, or it is
                damaged; then nothing has changed.
        """
        shapes = self._shapes if parameters is None else _shapes_of(parameters)
        saved = self._read(state_dict, functools.partial(_check, shapes or {}))
        there, here = entry(state_dict, "training", Mapping), self.method.to_config()
        if (name := entry(there, "training", str)) != self.method.name:
            raise refused(f"it is of {name}, and the training method here is {self.method.name}")
        for option in self.method.of_state:
            if there.get(option, here[option]) != here[option]:
                raise refused(
                    f"it has {option}={there[option]!r}, and here is {here[option]!r}: make the "
                    f"{type(self.method).__name__} as it was"
                )
        if self.method.state_is_own and saved.state and not saved.is_own:
            engine, saver = self.engine, saved.header
            raise refused(
                f"it is of rank {saver.rank} of {saver.size}, and this is rank {engine.rank} of "
                f"{engine.size}: the state of {name} is each rank's own. Save and load it on "
                "every rank; or take the entry 'training' out, and the method begins anew, best "
                "after optimizer.synchronize_parameters()"
            )
        losses = entry(state_dict, "losses", (list, tuple))
        if not all(map(is_number, losses)):
            raise refused(f"'losses' is {losses!r} where numbers were expected")
        compression = entry(state_dict, "compression", Mapping)
        self.reducer.load_state_dict(compression)
        state = saved.state if saved.is_own else _without(self.method.per_rank, saved.state)
        self._arrived, self._is_in_flight = state.pop(_ARRIVED, {}), False
        self.state, self.step = state, saved.header.step
        self._losses.clear()
        self._losses.extend(losses if saved.is_own else ())
        is_mean, step = saved.header.consolidated, saved.header.step
        self._consolidated = (step, dict(compression)) if is_mean else None
        self._shapes, self._start, self._has_begun = None, None, False


class _SentStore(MemoryStore):
    """The states of the compression of what a training method sends."""

    set_epoch_call = "optimizer.training.set_epoch(epoch)"

    def __init__(self, owner: Coordinator, like: Array) -> None:
        super().__init__()
        self._owner, self._like = owner, like

    def terms(self, own: Terms) -> Terms:
        return {**self._owner.terms(), "seed": own["seed"], "epoch": own["epoch"]}

    def for_messages(self, like: Array) -> Array:
        return like if self._like is None else self._like

    def forget(self, names: Iterable[str]) -> None:
        """Forget what of these tensors has not been sent yet."""
        for name in names:
            for key in self.per_rank.get(name, ()):
                self.states[name][key] = self.states[name][key] * 0


def _shapes_of(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: backend_of(x).shape(x) for name, x in arrays.items()}


def _check(shapes: Mapping[str, tuple[int, ...]], key: str, arrays: Arrays) -> None:
    for name, x in arrays.items():
        check_array(f"{key!r} of {name!r}", x)
        if (shape := backend_of(x).shape(x)) != shapes.get(name, shape):
            raise refused(
                f"{key!r} of {name!r} has shape {shape}, and the parameter {shapes[name]}"
            )


def _without(names: Container[str], arrays: Mapping[str, T]) -> dict[str, T]:
    return {name: x for name, x in arrays.items() if name not in names}
