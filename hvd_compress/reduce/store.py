"""Answers to a reducer's questions about the tensors whose gradients it averages."""

from __future__ import annotations

import abc
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from hvd_compress.agreement import Terms, listed
from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Compressor, Context, Exchange, Sparse, State
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.reduce.common_states import ArrayType, look


class Store(abc.ABC):
    """Keeps the states of tensors by name, and knows of tensors and their optimizer what a reducer
    does not.

    A reducer asks, and a store answers: it knows neither the reducer nor the ranks.  Every store
    says where states are (``names``, ``get``, ``keep``, ``state_for``); the rest has answers that
    are right for plain arrays.  Bindings to frameworks are stores, and :class:`MemoryStore` serves
    a custom loop.

    A store that knows its optimizer's learning rate:

    >>> class WithRate(MemoryStore):
    ...     def rate(self, name):
    ...         return 0.1
    >>> store = Reducer("topk", LocalEngine(), store=WithRate()).store
    >>> isinstance(store, Store), store.rate("w"), store.momentum("w")
    (True, 0.1, (0.0, False))
    """

    #: the calls that error messages tell users to write
    set_epoch_call = "set_epoch(epoch)"
    finish_call = "finish()"
    keep_undo_call = "keep_undo()"

    # -- states --------------------------------------------------------------------------------

    @abc.abstractmethod
    def names(self) -> Iterable[str]:
        """Return the names of all tensors that may have a state."""

    @abc.abstractmethod
    def get(self, name: str) -> State:
        """Return the state of a tensor as it is, which may be empty."""

    @abc.abstractmethod
    def keep(self, name: str, state: State) -> None:
        """Keep new entries of a state, beside those that stay."""

    def put_back(self, name: str, state: State) -> None:
        """Give a tensor a state that it had before, instead of the one that it has."""
        raise UnsupportedError(
            f"{type(self).__name__} cannot put states back, so no step can be discarded"
        )

    @abc.abstractmethod
    def state_for(self, name: str, gradient: Array, method: Compressor) -> State:
        """Return the entries of a state with which ``method`` can exchange this gradient, and no
        others: new ones if the tensor has none.  Raise ``ConfigError`` if they belong to another
        tensor."""

    def use(self, method: Compressor) -> None:
        """Go on with another method, and without states."""
        raise UnsupportedError(
            f"{type(self).__name__} keeps the states of one method: write this method instead "
            'of "auto"'
        )

    # -- gradients -----------------------------------------------------------------------------

    def prepared(self, name: str, gradient: Array, context: Context) -> Array:
        """Return the gradient that is exchanged instead of the one that was passed in."""
        return gradient

    def rows(self, name: str, gradient: Array, context: Context) -> Exchange | None:
        """Return the exchange of the rows of an embedding; ``None``: the gradient is dense."""
        return None

    def extent(self, name: str, gradient: Array) -> tuple[int, int]:
        """Return the number of elements and of bytes of an uncompressed gradient."""
        return backend_of(gradient).size(gradient), gradient.nbytes

    def norm(self, gradients: Mapping[str, Array]) -> Any:
        """Return the L2 norm of all gradients of this rank, of which there may be none.  It may be
        a collective of some ranks, and is asked once per step."""
        return math.hypot(*(backend_of(g).norm(g) for g in gradients.values()))

    def multiplied(self, direction: Any, factor: float) -> Any:
        """Return what came back for a gradient, times a number."""
        if factor == 1:
            return direction
        if isinstance(direction, Sparse):
            return direction._replace(values=direction.values * factor)
        return direction * factor

    def of_bucket(
        self, names: Sequence[str], gradients: Sequence[Array]
    ) -> tuple[Sequence[Mapping[str, Array]], str, Sequence[float]] | None:
        """Return states, the prefix of their keys, and momenta of the tensors of a bucket that may
        go on by its plan.  ``None``: one is of another kind now.

        Unlike all others this is called in every step, so bindings call no function for each
        tensor.
        """
        states = [self.get(name) for name in names]
        for gradient in gradients:
            backend_of(gradient).check_gradient(gradient, in_place=True)
        return states, "", [self.momentum(name)[0] for name in names]

    # -- the optimizer -------------------------------------------------------------------------

    def momentum(self, name: str) -> tuple[float, bool]:
        """Return momentum and Nesterov flag of the optimizer, which act inside the exchange."""
        return 0.0, False

    def rate(self, name: str) -> Any:
        """Return the learning rate of the next step, ``None`` if unknown."""
        return None

    def circumstances(self) -> Hashable:
        """Return the facts that only the store knows and exchanges of this step depend on, besides
        gradients, states and momenta.  ``None``: steps may differ all the same."""
        return ()

    # -- the ranks -----------------------------------------------------------------------------

    def terms(self, own: Terms) -> Terms:
        """Return everything that must be the same on all ranks, as text; ``own`` is what the
        reducer knows."""
        return own

    def numbers(self) -> Terms:
        """Return values that must be the same on all ranks whenever a step begins: the numbers of
        the optimizer, and a sample of the weights.  They may be about to be loaded or broadcast
        before."""
        return {}

    def for_messages(self, like: Array) -> Array:
        """Return an array of the kind in which ranks compare, given a gradient."""
        return like

    def is_waiting(self) -> bool:
        """Return whether there are gradients that the reducer has not been given yet."""
        return False


class Looks:
    """The kinds of the gradients of tensors, and the entries of the states that fit them."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[ArrayType, dict[str, ArrayType]]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._seen

    def expected(self, name: str, gradient: Array, method: Compressor) -> dict[str, ArrayType]:
        """Return what the entries of a state look like that fits a gradient."""
        seen = look(gradient)
        if name not in self._seen or self._seen[name][0] != seen:
            fresh = method.init(gradient)
            self._seen[name] = seen, {key: look(x) for key, x in fresh.items()}
        return self._seen[name][1]

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the shapes of all gradients so far, sorted by name."""
        return [(name, seen.shape) for name, (seen, _) in sorted(self._seen.items())]

    def of_states(self) -> dict[str, dict[str, ArrayType]]:
        """Return what is expected of states by name."""
        return {name: expected for name, (_, expected) in self._seen.items()}


def check_state(
    name: str, gradient: Array, state: State, expected: Mapping[str, ArrayType]
) -> None:
    """Raise ``ConfigError`` unless a state looks as expected: users may have given its arrays other
    memory since the last step."""
    if problem := misfit(state, expected):
        raise ConfigError(
            f"the gradient of {name!r} has {backend_of(gradient).size(gradient)} elements, and "
            f"of its state {problem}: one name belongs to one tensor, and a state to its model "
            "and options"
        )


def misfit(state: State, expected: Mapping[str, ArrayType]) -> str:
    """Return how a state differs from what was expected; an empty text if it fits."""
    if state.keys() != expected.keys():
        return f"there is {sorted(map(str, state))} where {sorted(expected)} was expected"
    for key, there in expected.items():
        here = look(state[key])
        if here[:2] != there[:2]:
            kinds = (f"{seen.dtype}{list(seen.shape)}" for seen in (here, there))
            return f"{key!r} is {' instead of '.join(kinds)}"
        if here != there:
            return f"{key!r} is on {here.device} instead of {there.device}"
    return ""


class MemoryStore(Store):
    """Keeps states in memory, for custom loops over any backend's arrays.

    Args:
        momentum, nesterov: of the optimizer, the same for all tensors.

    Attributes:
        states: the state of each tensor by name, as arrays by key.
        per_rank: the keys of the states that differ between ranks, by name.
        looks: of gradients and states.

    >>> store = MemoryStore(momentum=0.9)
    >>> reducer = Reducer(DGC(density=0.5, min_size=1), LocalEngine(), store=store)
    >>> _ = reducer.reduce({"w": np.array([[4.0, 1.0]])})
    >>> store.states["w"]["residual"], sorted(store.per_rank["w"])
    (array([0., 1.]), ['residual', 'velocity'])
    """

    def __init__(self, momentum: float = 0.0, nesterov: bool = False) -> None:
        self._momentum, self._nesterov = momentum, nesterov
        self.states: dict[str, State] = {}
        self.per_rank: dict[str, frozenset[str]] = {}
        self.looks = Looks()
        self._inconsistent: set[str] = set()

    def replace(
        self,
        states: dict[str, State],
        per_rank: dict[str, frozenset[str]],
        inconsistent: Iterable[str] = (),
    ) -> None:
        """Go on with states that were loaded; those of ``inconsistent`` tensors are repaired with
        their next gradients."""
        self.states, self.per_rank, self.looks = states, per_rank, Looks()
        self._inconsistent = set(inconsistent)

    def use(self, method: Compressor) -> None:
        self.replace({}, {})

    def names(self) -> Iterable[str]:
        return self.states

    def get(self, name: str) -> State:
        return self.states.get(name, {})

    def keep(self, name: str, state: State) -> None:
        self.states[name] = {**self.states.get(name, {}), **state}

    def put_back(self, name: str, state: State) -> None:
        if state:
            self.states[name] = state
        else:
            self.states.pop(name, None)
            self.per_rank.pop(name, None)

    def state_for(self, name: str, gradient: Array, method: Compressor) -> State:
        if name not in self.states:
            self.states[name] = method.init(gradient)
            self.per_rank[name] = method.per_rank(gradient)
        elif name in self._inconsistent:
            self._inconsistent.remove(name)
            self.states[name] = method.repaired(gradient, self.states[name])
        is_new, state = name not in self.looks, self.states[name]
        expected = self.looks.expected(name, gradient, method)
        if is_new and (shared := method.common(gradient)).keys() & state.keys():
            expected = expected | {key: look(x) for key, x in shared.items()}
        keys = state.keys() if is_new else expected.keys() & state.keys()
        own = {key: state[key] for key in keys}
        check_state(name, gradient, own, expected)
        return own

    def of_bucket(
        self, names: Sequence[str], gradients: Sequence[Array]
    ) -> tuple[Sequence[Mapping[str, Array]], str, Sequence[float]] | None:
        if any(name not in self.states for name in names):
            return None
        return super().of_bucket(names, gradients)

    def momentum(self, name: str) -> tuple[float, bool]:
        return self._momentum, self._nesterov

    def circumstances(self) -> Hashable:
        return self._nesterov

    def terms(self, own: Terms) -> Terms:
        return {
            **own,
            "momentum, nesterov": f"{self._momentum}, {self._nesterov}",
            "tensors so far": listed(self.looks.shapes()),
        }


class Undo:
    """Copies of states, taken before the first exchange of a step changes them in place, and put
    back if its averages are not used.

    An exchange takes what it sends out of residuals and velocities.  If nobody applies the average,
    that part of earlier gradients would be lost, and what the discarded gradients left would stay.

    Args:
        store: keeps the states.

    Attributes:
        step: the number of the step that can be undone as a whole, or ``None``.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._states = store, dict[str, State]()
        self.step: Any = None

    def keep(self, names: Iterable[str]) -> None:
        """Copy the states of tensors, unless this step has done so."""
        for name in names:
            if name not in self._states:
                state = self._store.get(name)
                self._states[name] = {key: backend_of(x).copy(x) for key, x in state.items()}

    def put_back(self, names: Iterable[str]) -> None:
        """Give tensors the states of before the step; one that is new has none."""
        for name in names:
            self._store.put_back(name, self._states.get(name, {}))

    def forget(self) -> None:
        """Keep nothing any more: the averages were used, or other states have come."""
        self._states, self.step = {}, None
