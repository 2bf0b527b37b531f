"""Training methods whose ranks take local steps between exchanges.

A method has two functions around the local step of a rank, both generators of requests as exchanges
are (:mod:`hvd_compress.base`).  ``before_step`` runs when the gradients are known, and
``after_step`` when the user's optimizer has stepped.  Both take and return parameters and state as
arrays by name, of any backend, and change none in place.

A method may send the requests of compressors, which go to the engine as they are.  It may also
request an average over the ranks.  :class:`Start` and :class:`Finish` send arrays through the
method's ``compression``, possibly with local steps in between; :class:`Mean` sends them as they
are.

:class:`~hvd_compress.systems.coordinator.Coordinator` runs a method over an engine, and
:class:`~hvd_compress.systems.ranks.Ranks` runs all ranks in one process.
"""

from __future__ import annotations

import abc
import inspect
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Compressor
from hvd_compress.config import Configurable, numbers
from hvd_compress.errors import ConfigError
from hvd_compress.methods import NoCompression
from hvd_compress.methods.texts import as_fixed
from hvd_compress.requests import Collective

#: arrays by the name of the parameter
Arrays = dict[str, Array]
#: what a rank keeps between steps: arrays by name, by key
State = dict[str, Arrays]
#: the ranks of each group
Groups = tuple[tuple[int, ...], ...]


class Start(NamedTuple):
    """Begin to average ``arrays`` over the ranks, through the method's compression; the reply is
    ``None``.

    Attributes:
        arrays: floats of any shape by name, the same names and shapes on all ranks.
        round: counts, from 0, the averages of the same arrays.

    >>> method, x = DiLoCo(sync_every=1), {"w": np.zeros(2)}
    >>> next(method.after_step({"w": x["w"] - 1}, method.init(x), StepContext()))
    Start(arrays={'w': array([1., 1.])}, round=0)
    """

    arrays: Arrays
    round: int


class Finish(NamedTuple):
    """Wait for what was started, in this step or an earlier one; the reply is the averages by name,
    the same bits on all ranks.

    >>> method, x = DiLoCo(sync_every=1), {"w": np.zeros(2)}
    >>> steps = method.after_step({"w": x["w"] - 1}, method.init(x), StepContext())
    >>> start, finish = next(steps), steps.send(None)
    >>> finish
    Finish()
    """


class Mean(NamedTuple):
    """Average over the ranks without compression; the reply is the averages by name.

    Attributes:
        arrays: floats of any shape by name, the same names and shapes on all ranks.

    >>> next(LocalSGD().consensus({"w": np.ones(2)}, {}))  # to be tested
    Mean(arrays={'w': array([1., 1.])})
    """

    arrays: Arrays


class Unsent(NamedTuple):
    """Ask for what the compression has kept of this rank's arrays, its residuals; nothing is sent.
    The reply has their shapes; arrays of which nothing was sent yet are left out.

    Attributes:
        arrays: those that are averaged, by name.

    >>> method, x = LocalSGD(1, compression="topk", unsent="stays"), {"w": np.zeros(2)}
    >>> next(method.after_step(x, method.init(x), StepContext()))
    Unsent(arrays={'w': array([0., 0.])})
    """

    arrays: Arrays


#: what ranks compare when a state begins, by :meth:`TrainingMethod.in_common`
WEIGHTS_AT_START = (
    "weights at the start, which have to be made equal before the first step, in PyTorch by "
    "hvd.broadcast_parameters(model.state_dict(), root_rank=0)"
)

Request = Start | Finish | Mean | Unsent | Collective
#: returns the parameters and the state
Steps = Generator[Request, Any, tuple[Arrays, State]]


class StepContext(NamedTuple):
    """The circumstances of a step that a method may know.

    Attributes:
        step: the number of the local step under way, from 1; equal on all ranks.
        rank, size: this rank and the number of ranks.
        losses: the last losses that were reported, the latest last, at most
            ``method.loss_window``; numbers or arrays of one element.
        rates: the learning rates of this step by name; empty if unknown.
        node: the name of this rank's node.
        like: an array of the kind that messages are made of, for methods that send something even
            when no parameter is trained.

    >>> context = StepContext(step=8, rank=1, size=4)
    >>> context.step, context.losses
    (8, ())
    """

    step: int = 1
    rank: int = 0
    size: int = 1
    losses: Sequence[Any] = ()
    rates: Mapping[str, float] = {}
    node: str = ""
    like: Array = np.empty(0)


class TrainingMethod(Configurable, abc.ABC, kind="training"):
    """A way to train with local steps, with its options; subclasses are frozen dataclasses.

    Parameters and state are arrays by name, of any backend and shape: floats, of which half
    precisions are added up in float32.  All methods raise ``ConfigError`` for options that make no
    sense, and when training begins with a number of ranks that does not fit.

    >>> class Averaging(TrainingMethod):
    ...     def after_step(self, parameters, state, context):
    ...         return (yield Mean(parameters)), state
    >>> ranks = Ranks(Averaging(), size=2)
    >>> x = ranks.before_step([{"w": np.array([0.0])}, {"w": np.array([4.0])}])
    >>> ranks.after_step(x)[0]["w"]
    array([2.])
    """

    #: keys of the state under which ranks differ
    per_rank: ClassVar[frozenset[str]] = frozenset()
    #: all of the state is this rank's own, and makes sense only as a whole: another rank cannot go
    #: on with it, and it begins anew when other parameters are trained
    state_is_own: ClassVar[bool] = False
    #: the options that say what a saved state means
    of_state: ClassVar[tuple[str, ...]] = ()
    #: the context needs ``rates``, which must be equal on all ranks
    needs_rates: ClassVar[bool] = False
    #: the number of losses that the context has to have; 0 if none are needed
    loss_window: ClassVar[int] = 0
    #: the method of :class:`Start`
    compression: Compressor = NoCompression()

    @property
    def acts_before(self) -> bool:
        """Whether gradients must be known before the optimizer steps."""
        return type(self).before_step is not TrainingMethod.before_step

    def check_ranks(self, size: int) -> None:
        """Raise ``ConfigError`` unless the method works with ``size`` ranks."""
        return

    def init(self, parameters: Arrays) -> State:
        """Return the state of ``parameters`` before their first local step; there may be none of
        them."""
        return {}

    def in_common(self, state: State) -> list[str]:
        """Return a text with a checksum for each array of the state that must be the same on all
        ranks."""
        if self.state_is_own:
            return []
        return [
            f"{name} ({key}) {_checksum(x):08x}"
            for key, arrays in state.items()
            if key not in self.per_rank
            for name, x in arrays.items()
        ]

    def before_step(self, parameters: Arrays, state: State, context: StepContext) -> Steps:
        """Run between the computation of gradients and the local step."""
        return parameters, state
        yield

    def after_step(self, parameters: Arrays, state: State, context: StepContext) -> Steps:
        """Run after the local step."""
        return parameters, state
        yield

    def consensus(self, parameters: Arrays, state: State) -> Generator[Request, Any, Arrays]:
        """Return the parameters that are to be tested: the average of the ranks' own."""
        return (yield Mean(parameters))


def as_training_method(method: Any) -> TrainingMethod:
    """Return a method from an instance, or from a class, whose options have their defaults then."""
    if isinstance(method, type) and issubclass(method, TrainingMethod):
        return method()
    if not isinstance(method, TrainingMethod):
        raise ConfigError(
            f"{method!r} is no training method: pass for instance ExactDiffusion('cycle') of "
            "hvd_compress.systems.graphs, or LocalSGD() of hvd_compress.systems.rounds"
        )
    return method


#: what to do instead of setting an option of ``DistributedOptimizer``
_INSTEAD = {
    "compression": "codecs are options of LEAD, and compression= one of LocalSGD",
    "backward_passes_per_step": "gradients add up until step(), however many passes there are",
}


def train_by_method(
    train: Callable[..., Any], signature: inspect.Signature, options: Mapping[str, Any]
) -> Any:
    """Return what ``train(optimizer, method)`` does, with those of the options of
    ``DistributedOptimizer`` that it has.

    Args:
        signature: that of ``DistributedOptimizer``, with the defaults.

    Raises:
        ConfigError: another one, which is about gradients, is not left out.
    """
    known = inspect.signature(train).parameters
    for option, value in options.items():
        if option in known:
            continue
        default = signature.parameters[option].default
        if value is not default and value != default:
            instead = f": {_INSTEAD[option]}" if option in _INSTEAD else ""
            raise ConfigError(
                f"{option}={value!r:.60} and method={options['method']!r} cannot be combined, "
                f"since a training method sends no gradients; leave {option} out{instead}"
            )
    return train(**{name: value for name, value in options.items() if name in known})


def methods_in(names: Mapping[str, Any]) -> dict[str, type[TrainingMethod]]:
    """Return the training methods among the names of a module."""
    return {
        name: cls
        for name, cls in names.items()
        if isinstance(cls, type) and issubclass(cls, TrainingMethod) and not inspect.isabstract(cls)
    }


def checked_compression(
    compression: Any, sent: str = "between local steps there are averages to send"
) -> Compressor:
    """Return the method of an option ``compression``, which must be one for what is ``sent``."""
    method = as_fixed(compression)
    if method.partner is not None:
        raise ConfigError(
            f"compression={method.name!r} hands out the momenta of {method.partner}: {sent}; use "
            "for instance compression='topk:density=0.01'"
        )
    return method


check_groups = numbers(
    "the number of ranks of a group, or None", lambda n: n >= 1, whole=True, optional=True
)


def groups_of(in_group: int, size: int) -> Groups:
    """Divide a number of ranks into groups of so many; the last one may have fewer.

    >>> groups_of(2, 5)
    ((0, 1), (2, 3), (4,))
    """
    ranks = range(size)
    return tuple(tuple(ranks[first : first + in_group]) for first in range(0, size, in_group))


def residuals(arrays: Arrays, states: Mapping[str, Mapping[str, Array]]) -> Arrays:
    """Return the reply to :class:`Unsent`, given the states of the compression by name."""
    found = {}
    for name, x in arrays.items():
        if (kept := states.get(name, {}).get("residual")) is not None:
            found[name] = backend_of(kept).reshape(kept, backend_of(x).shape(x))
    return found


def widened(x: Array) -> Array:
    """Return ``x`` in a dtype to add up in: half precisions become float32."""
    xp = backend_of(x)
    return xp.cast(x, "float32") if xp.dtype(x) in ("float16", "bfloat16") else x


def copied(x: Array) -> Array:
    """Return a copy in a dtype to add up in."""
    wide = widened(x)
    return backend_of(x).copy(x) if wide is x else wide


def apart(x: Array, other: Array) -> Array:
    """Return ``x`` in the dtype of ``other``, in memory of its own."""
    found = like(x, other)
    return backend_of(found).copy(found) if found is x else found


def like(x: Array, other: Array) -> Array:
    return backend_of(x).cast(x, backend_of(other).dtype(other))


def all_finite(arrays: Mapping[str, Array]) -> bool:
    return all(bool(backend_of(x).all_finite(x)) for x in arrays.values())


def _checksum(x: Array) -> int:
    wide = widened(x)  # NumPy has no bfloat16
    return zlib.crc32(np.ascontiguousarray(backend_of(wide).to_numpy(wide)).tobytes())
