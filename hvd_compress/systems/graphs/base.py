"""The contract of decentralised methods: ranks exchange vectors with their neighbours only.

A method is a :class:`~hvd_compress.systems.base.TrainingMethod`.  Each rank has parameters of its
own.  The local optimizer steps from x to ``local``, which is ``x - mu grad(x)`` for SGD.  The
method makes the next x of both, by messages between neighbours.  Methods are written in terms of
the step ``s = local - x``, so the learning rate is the local optimizer's; theory is about constant
rates and SGD.

A NaN or Inf on a rank reaches its neighbours with the next message, and all ranks as soon as the
graph's diameter in steps.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Generator, Iterable
from typing import Any, ClassVar, NamedTuple, cast

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Coding, Context
from hvd_compress.codecs.base import Codec
from hvd_compress.codecs.floats import plain
from hvd_compress.config import Configurable, check_between, converted
from hvd_compress.errors import ConfigError
from hvd_compress.meetings.averaging import whole
from hvd_compress.requests import Neighbors
from hvd_compress.systems.base import (
    Arrays,
    Mean,
    State,
    StepContext,
    Steps,
    TrainingMethod,
    copied,
)
from hvd_compress.systems.graphs.matrices import check_symmetric
from hvd_compress.systems.graphs.topologies import Cycle, Topology, as_topology

#: a method's state on a rank: flat arrays by key
Vectors = dict[str, Array]
#: returns the new x and the new state
Update = Generator[Neighbors, Any, tuple[Array, Vectors]]

_WHOLE = whole()


def as_codec(codec: Any) -> Codec:
    """Return an option ``codec`` for messages to neighbours; ``None`` for numbers as they are."""
    found = plain() if codec is None else codec
    if not isinstance(found, Codec):
        raise ConfigError(f"codec must be a codec, for instance blockwise(2), or None: {codec!r}")
    return found


class Proximal(Configurable, abc.ABC, kind="proximal"):
    """A regulariser r that need not be smooth, by its operator
    ``prox_{eta r}(v) = argmin_x r(x) + |x - v|^2 / (2 eta)``."""

    @abc.abstractmethod
    def __call__(self, v: Array, eta: float) -> Array:
        """Return prox_{eta r}(v), of any shape."""


@dataclasses.dataclass(frozen=True)
class l1(Proximal, name="l1"):
    """r(x) = weight |x|_1: magnitudes shrink by eta * weight.

    An operator is called with an array of floats, of any shape, and a step eta.

    Args:
        weight: 0 or more.

    >>> l1(weight=1.0)(np.array([-2.0, 0.05, 1.0]), eta=0.1)
    array([-1.9,  0. ,  0.9])
    """

    weight: float

    def __post_init__(self) -> None:
        check_between("weight", self.weight, 0)

    def __call__(self, v: Array, eta: float) -> Array:
        xp, by = backend_of(v), eta * self.weight
        zero = xp.full_like(v, 0.0)
        return xp.maximum(v - by, zero) - xp.maximum(-v - by, zero)


class Neighborhood(NamedTuple):
    """A rank's part of the graph of a step.

    Attributes:
        rank: this rank, from 0.
        step: the number of the step, from 1.
        own: the weight of this rank itself, a fraction.
        targets, sources: the ranks that it sends to and receives from, ascending.
        weights: of the sources, in their order; with ``own`` they add up to 1.

    >>> network = Diffusion("cycle").network(rank=0, size=4, step=1)
    >>> network.sources, [round(w, 3) for w in network.weights], round(network.own, 3)
    ((1, 3), [0.333, 0.333], 0.333)
    """

    rank: int
    step: int
    own: float
    targets: tuple[int, ...]
    sources: tuple[int, ...]
    weights: tuple[float, ...]

    def lazy(self) -> Neighborhood:
        """Return this rank's part of the graph whose matrix is (I + W) / 2."""
        weights = tuple(w / 2 for w in self.weights)
        return self._replace(own=(1 + self.own) / 2, weights=weights)


@functools.lru_cache(maxsize=4096)
def network_of(topology: Topology, size: int, phase: int, rank: int) -> Neighborhood:
    """Return a rank's part of the graph."""
    w = topology.weights(size, phase)
    graph = topology.graph(size, phase)
    directed = graph.is_directed()
    targets = tuple(sorted(graph.successors(rank) if directed else graph.neighbors(rank)))
    sources = tuple(sorted(graph.predecessors(rank) if directed else graph.neighbors(rank)))
    weights = tuple(float(w[rank, source]) for source in sources)
    return Neighborhood(rank, 1, float(w[rank, rank]), targets, sources, weights)


def mix(
    x: Array, network: Neighborhood, coding: Coding = _WHOLE, seed: int = 0
) -> Generator[Neighbors, Any, tuple[Array, Array]]:
    """Send a flat array to the neighbours, and return a weighted sum over them and this rank.

    Args:
        x: (n,), float32 or float64, as long on all ranks.
        network: neighbours and weights.
        coding: how all values are sent; by default as they are.
        seed: of codings that draw.

    Returns:
        Two arrays like ``x``, by ``yield from``: x as the neighbours saw it, and the weighted sum.
    """
    context = Context(rank=network.rank, step=network.step, seed=seed)
    encoded = coding.encode(x, {}, context)
    seen: Any = encoded.sent
    messages = yield Neighbors(encoded.message, network.targets, network.sources)
    total = seen * network.own
    for source, weight, theirs in zip(network.sources, network.weights, messages, strict=True):
        total = total + coding.decode([theirs], x, context, [source]).total * weight
    return seen, total


@dataclasses.dataclass(frozen=True)
class DecentralizedMethod(TrainingMethod):
    """A way to train over a graph, with its options; subclasses are frozen dataclasses.

    They define :meth:`update`, a pure function of flat arrays, and :meth:`start` if they keep
    something between steps.  Arrays are all trained parameters of a rank end to end: float64 if one
    of them is, otherwise float32, which half precisions are widened to.

    With an option ``prox`` they minimise the mean of the ranks' functions and r; the operator is
    applied to the result of :meth:`update`.

    All of them have an option ``topology``, see :class:`Diffusion`.  Options that make no sense
    raise ``ConfigError``.  When training begins, so do topologies that do not fit.

    >>> import dataclasses
    >>> @dataclasses.dataclass(frozen=True)
    ... class Twice(DecentralizedMethod):
    ...     def update(self, x, local, state, network):
    ...         _, once = yield from mix(local, network)
    ...         return (yield from mix(once, network))[1], {}
    >>> simulate(Twice(), lambda rank, x, step: 0 * x, [[0.0], [0.0], [9.0]], 1, 0.1).ravel()
    array([3., 3., 3.])
    """

    acts_before: ClassVar[bool] = True
    state_is_own: ClassVar[bool] = True
    #: the method's theory needs W = W^T
    symmetric: ClassVar[bool] = False
    #: an option of some; annotated here, it would be the first of all
    prox = cast("Proximal | None", None)

    topology: Topology = dataclasses.field(default=Cycle(), metadata=converted(as_topology))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prox is not None and not isinstance(self.prox, Proximal):
            raise ConfigError(f"prox must be a proximal operator such as l1(0.05): {self.prox!r}")

    @property
    def needs_rates(self) -> bool:  # type: ignore[override]
        return self.prox is not None

    def start(self, x: Array) -> Vectors:
        """Return the state before the first step from the flat ``x``."""
        return {}

    @abc.abstractmethod
    def update(self, x: Array, local: Array, state: Vectors, network: Neighborhood) -> Update:
        """Return the next x and state.

        Args:
            x: the parameters at which the gradient was computed, flat.
            local: where the local step led from there.
            state: what the last step returned.
            network: neighbours and weights.
        """

    def network(self, rank: int, size: int, step: int) -> Neighborhood:
        """Return a rank's neighbours and weights in a step, from 1.

        Raises:
            ConfigError: the topology does not fit the method or the number of ranks.
        """
        phase = (step - 1) % self.topology.period(size)
        if self.symmetric:
            _check_symmetric(self.topology, size, type(self).__name__)
        return network_of(self.topology, size, phase, rank)._replace(step=step)

    def finish(self, x: Array, rate: float | None) -> Array:
        """Return a parameter from the array that :meth:`update` returned for it; ``rate`` is its
        learning rate, if the method ``needs_rates``."""
        return x if self.prox is None or rate is None else self.prox(x, rate)

    # -- the methods of a training method ----------------------------------------------------

    def check_ranks(self, size: int) -> None:
        for step in range(1, self.topology.period(size) + 1):
            self.network(0, size, step)

    def init(self, parameters: Arrays) -> State:
        return _split(self.start(_joined(parameters, parameters)), parameters) if parameters else {}

    def before_step(self, parameters: Arrays, state: State, context: StepContext) -> Steps:
        origin = {name: copied(x) for name, x in parameters.items()}
        return parameters, {**state, _ORIGIN: origin}
        yield

    def after_step(self, parameters: Arrays, state: State, context: StepContext) -> Steps:
        if not parameters:  # all are frozen, which other ranks learn by this
            yield Mean({})
            return parameters, {}
        vectors = {key: _joined(arrays, parameters) for key, arrays in state.items()}
        x, local = vectors.pop(_ORIGIN), _joined(parameters, parameters)
        if vectors.keys() != (own := self.start(x[:0]).keys()):
            raise ConfigError(
                f"{type(self).__name__} has the state {', '.join(own)}, and what was loaded has "
                f"{', '.join(vectors)}: it is of another version. Take the entry 'training' out of "
                "the checkpoint, and the method begins again"
            )
        network = self.network(context.rank, context.size, context.step)
        x, vectors = yield from self.update(x, local, vectors, network)
        found = _split({_ORIGIN: x, **vectors}, parameters)
        result = {}
        for name, own in found.pop(_ORIGIN).items():
            rate = context.rates[name] if self.needs_rates else None
            result[name] = backend_of(own).restore(self.finish(own, rate), parameters[name])
        return result, found


#: the key of the parameters before the local step, between ``before_step`` and ``after_step``
_ORIGIN = "origin"


@functools.lru_cache(maxsize=64)
def _check_symmetric(topology: Topology, size: int, method: str) -> None:
    for step in range(topology.period(size)):
        check_symmetric(topology.weights(size, step), method)


def _joined(arrays: Arrays, names: Iterable[str]) -> Array:
    """Return arrays end to end in the order of ``names``, in the dtype that is wide enough for
    all."""
    xp = backend_of(next(iter(arrays.values())))
    flat = [xp.widen(arrays[name]) for name in names]
    dtypes = {xp.dtype(x) for x in flat}
    dtype = "float64" if "float64" in dtypes else "float32"
    return xp.concat([x if xp.dtype(x) == dtype else xp.cast(x, dtype) for x in flat])


def _split(vectors: Vectors, parameters: Arrays) -> State:
    """Undo :func:`_joined` for each of the vectors; the dtypes stay wide."""
    state: State = {}
    for key, vector in vectors.items():
        xp = backend_of(vector)
        parts = xp.split(vector, [xp.size(x) for x in parameters.values()])
        state[key] = {
            name: xp.reshape(part, xp.shape(x))
            for (name, x), part in zip(parameters.items(), parts, strict=True)
        }
    return state
