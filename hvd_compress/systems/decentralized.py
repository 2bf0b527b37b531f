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
from collections.abc import Generator, Iterable
from typing import Any, ClassVar, cast

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Coding, Context
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
from hvd_compress.systems.topologies import (
    Graph,
    Neighborhood,
    Topology,
    as_topology,
    check_symmetric,
)

#: a method's state on a rank: flat arrays by key
Vectors = dict[str, Array]
#: returns the new x and the new state
Update = Generator[Neighbors, Any, tuple[Array, Vectors]]

_WHOLE = whole()


@dataclasses.dataclass(frozen=True)
class l1(Configurable, kind="proximal", name="l1"):
    """The regulariser r(x) = weight |x|_1, by its operator ``prox_{eta r}(v) = argmin_x r(x) +
    |x - v|^2 / (2 eta)``: magnitudes shrink by eta * weight.

    It is called with an array of floats v, of any shape, and a step eta.

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

    They define :meth:`update`, a pure function of flat arrays, and ``keys`` if they keep something
    between steps.  Arrays are all trained parameters of a rank end to end: float64 if one of them
    is, otherwise float32, which half precisions are widened to.

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

    state_is_own: ClassVar[bool] = True
    #: of the vectors that are kept, all zero before the first step
    keys: ClassVar[tuple[str, ...]] = ()
    #: the method's theory needs W = W^T
    symmetric: ClassVar[bool] = False
    #: an option of some; annotated here, it would be the first of all
    prox = cast("l1 | None", None)

    topology: Topology = dataclasses.field(default=Graph("cycle"), metadata=converted(as_topology))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prox is not None and not isinstance(self.prox, l1):
            raise ConfigError(f"prox must be a proximal operator such as l1(0.05): {self.prox!r}")

    @property
    def needs_rates(self) -> bool:  # type: ignore[override]
        return self.prox is not None

    @abc.abstractmethod
    def update(self, x: Array, local: Array, state: Vectors, network: Neighborhood) -> Update:
        """Return the next x and state.

        Args:
            x: the parameters at which the gradient was computed, flat.
            local: where the local step led from there.
            state: what the last step returned.
            network: neighbours and weights.
        """

    # -- the methods of a training method ----------------------------------------------------

    def check_ranks(self, size: int) -> None:
        for step in range(self.topology.period(size)):
            w = self.topology.weights(size, step)
            if self.symmetric:
                check_symmetric(w, type(self).__name__)

    def init(self, parameters: Arrays) -> State:
        if not parameters:
            return {}
        x = _joined(parameters, parameters)
        zeros = {key: x * 0 for key in self.keys}  # noqa: C420, each has memory of its own
        return _split(zeros, parameters)

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
        network = self.topology.neighborhood(context.rank, context.size, context.step)
        x, vectors = yield from self.update(x, local, vectors, network)
        found = _split({_ORIGIN: x, **vectors}, parameters)
        result = {}
        for name, own in found.pop(_ORIGIN).items():
            x = own if self.prox is None else self.prox(own, context.rates[name])
            result[name] = backend_of(own).restore(x, parameters[name])
        return result, found


#: the key of the parameters before the local step, between ``before_step`` and ``after_step``
_ORIGIN = "origin"


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
