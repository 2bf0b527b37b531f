"""Methods made of methods: by tensor, and by time."""

from __future__ import annotations

import abc
import dataclasses
import fnmatch
import functools
import math
from typing import Any

from hvd_compress.base import Array, Compressor, Context, Encoded, Exchange, Place, State
from hvd_compress.chain import Chain, chain
from hvd_compress.config import Configurable, as_tuple, converted, is_whole
from hvd_compress.errors import ConfigError
from hvd_compress.methods.chained import Chained
from hvd_compress.methods.texts import as_compressor
from hvd_compress.schedules import Start, as_start, started
from hvd_compress.transforms import momentum_after_averaging


@dataclasses.dataclass(frozen=True)
class rule(Configurable, kind="block", name="rule"):
    """A method for the tensors that fit, as a part of :func:`partition`::

        compression=hvd.partition(hvd.rule(hvd.DGC(), ndim=2, min_size=10_000), otherwise="fp16")

    Options:
        compressor: a method.
        names: a shell pattern of tensor names, such as ``"encoder.*.weight"``; "*" fits all.
        min_size: the least number of elements.
        ndim: number of dimensions; ``None``: any.

    >>> fits = rule(TopK(), names="*.weight", min_size=100).fits
    >>> fits("fc.weight", (10, 20)), fits("fc.weight", (3, 3)), fits("fc.bias", (200,))
    (True, False, False)
    """

    compressor: Compressor
    names: str = "*"
    min_size: int = 0
    ndim: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_method(self.compressor)
        if not isinstance(self.names, str):
            raise ConfigError(f"names must be a pattern such as '*.bias'; got {self.names!r}")
        for option in ("min_size", "ndim"):
            value = getattr(self, option)
            if not (is_whole(value) and value >= 0) and (value is not None or option == "min_size"):
                raise ConfigError(f"{option} must be a whole number, 0 or more; got {value!r}")

    def fits(self, name: str, shape: tuple[int, ...]) -> bool:
        size = math.prod(shape)
        return (
            fnmatch.fnmatchcase(name, self.names)
            and self.min_size <= size
            and self.ndim in (None, len(shape))
        )


def _check_method(part: Any) -> None:
    if not isinstance(part, Compressor):
        raise ConfigError(f"{part!r} is no compression method: write DGC() or partition()")
    if part.is_chosen_later:
        raise ConfigError(f"{part.name} chooses for all tensors and steps: it cannot be a part")


class _Composed(Compressor):
    """The base of methods that consist of parts.

    An optimizer has momentum for all tensors or for none.  If one part takes momentum over, the
    parts that leave it to the optimizer therefore get momentum after averaging.
    """

    @property
    @abc.abstractmethod
    def _parts(self) -> tuple[Compressor, ...]: ...

    def _check_parts(self) -> None:
        for part in self._parts:
            _check_method(part)
            if part.partner is not None:
                raise ConfigError(f"{part.name} goes with {part.partner} alone, for all tensors")
        for option in ("momentum", "nesterov", "weight_decay"):
            self._common(option)
        for part in self._parts:
            self._with_momentum(part)  # raises where nothing takes it over

    def _common(self, option: str) -> Any:
        takers = [part for part in self._parts if part.takes_momentum]
        found = {getattr(part, option) for part in takers}
        if option == "weight_decay":  # of those that know of it
            found -= {None}
        found = found or {None}
        if len(found) > 1:
            raise ConfigError(
                f"{option} is the optimizer's, one for all: methods of one composition that take "
                f"it over must have the same, not {sorted(found, key=str)}"
            )
        return found.pop()

    momentum = property(lambda self: self._common("momentum"))
    nesterov = property(lambda self: self._common("nesterov"))
    weight_decay = property(lambda self: self._common("weight_decay"))

    def _with_momentum(self, part: Compressor) -> Compressor:
        takes = self.takes_momentum and not part.takes_momentum
        return _momentum_after(part, self.momentum, self.nesterov) if takes else part


def _momentum_after(
    method: Compressor, momentum: float | None, nesterov: bool | None
) -> Compressor:
    def after(part: Compressor) -> Compressor:
        return _momentum_after(part, momentum, nesterov)

    if isinstance(method, Chained | Chain):
        return MomentumAfter(method, momentum, nesterov)
    if isinstance(method, Switch):
        return dataclasses.replace(method, first=after(method.first), then=after(method.then))
    if isinstance(method, Partition):
        rules = [dataclasses.replace(r, compressor=after(r.compressor)) for r in method.rules]
        return Partition(tuple(rules), after(method.otherwise))
    raise ConfigError(
        f"{method.name} leaves momentum to the optimizer, and others here take it over: "
        "write a method that does, or a chain"
    )


@dataclasses.dataclass(frozen=True)
class MomentumAfter(Chained, name="momentum_after"):
    """Apply momentum to the average of a method that leaves momentum to the optimizer.  Partitions
    and switches do so themselves if another of their parts takes momentum over::

        compression=hvd.MomentumAfter(hvd.TopK(density=0.01))

    State: that of the method, and ``velocity``.

    Options:
        compressor: a chain, or a method that is made of chains, as most are.
        momentum, nesterov: ``None`` takes the optimizer's.

    >>> world = World(MomentumAfter(TopK(density=0.5), momentum=0.9), size=1)
    >>> [world.exchange([np.array([4.0, 0.0])])[0].direction.tolist() for step in range(2)]
    [[4.0, 0.0], [7.6, 0.0]]
    """

    compressor: Compressor
    momentum: float | None = None
    nesterov: bool | None = None

    takes_momentum = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.compressor, Chained | Chain):
            raise ConfigError(f"compressor must be a chain, or made of chains: {self.compressor!r}")

    def chain(self, gradient: Array, context: Context) -> Chain:
        return self._then_momentum(self.compressor.chain(gradient, context))

    def template(self, gradient: Array) -> Chain:
        return self._then_momentum(self.compressor.template(gradient))

    @functools.cache  # noqa: B019, one chain, and so one form of its buckets, in all steps
    def _then_momentum(self, inner: Compressor) -> Chain:
        assert isinstance(inner, Chain)
        # The first one settles last.
        after = momentum_after_averaging(self.momentum, self.nesterov)
        return chain(after, *inner.transforms, via=inner.via)

    def rows_at(self, context: Context) -> str:
        return self.compressor.rows_at(context)


@dataclasses.dataclass(frozen=True)
class Partition(_Composed, name="partition"):
    """Use different methods for different tensors: the first rule that fits decides.
    :func:`partition` makes it::

        compression=hvd.partition(("*.bias", "none"), otherwise="topk:density=0.01")

    Options:
        rules: instances of :class:`rule`, in the order in which they are tried.
        otherwise: the method of tensors that no rule fits.

    Raises:
        ConfigError: the methods want different momenta of one optimizer, or one of them goes with
            an optimizer of its own.

    >>> method = partition(("*.bias", "none"), otherwise="topk:density=0.01")
    >>> method.for_tensor("fc.bias", (10,)).name, method.for_tensor("fc.weight", (10, 20)).name
    ('none', 'topk')
    """

    rules: tuple[rule, ...] = dataclasses.field(metadata=converted(as_tuple("rules")))
    otherwise: Compressor

    def __post_init__(self) -> None:
        super().__post_init__()
        for entry in self.rules:
            if not isinstance(entry, rule):
                raise ConfigError(f"{entry!r} is not a rule: write rule(method, names='*.bias')")
        self._check_parts()

    @property
    def is_steady(self) -> bool:  # type: ignore[override]
        return all(part.is_steady for part in self._parts)

    @property
    def _parts(self) -> tuple[Compressor, ...]:
        return (*(entry.compressor for entry in self.rules), self.otherwise)

    @functools.cache  # noqa: B019, a few methods live as long as the training
    def for_tensor(self, name: str, shape: tuple[int, ...]) -> Compressor:
        fitting = (entry.compressor for entry in self.rules if entry.fits(name, shape))
        found = next(fitting, self.otherwise).for_tensor(name, shape)
        return self._with_momentum(found)

    def _not_alone(self, *_: Any) -> Any:
        raise TypeError("a partition depends on names: ask for_tensor(name, shape) first")

    init = common = per_rank = exchange = _not_alone  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True)
class Switch(_Composed, name="switch"):
    """Use one method in the first steps and another one from then on.  :func:`switch` makes it::

        compression=hvd.switch("none", hvd.DGC(density=0.01), start=500)

    State: that of both methods, which share arrays of the same key.  A residual stays as it is
    while the method in use has none.

    Options:
        first, then: methods.
        start: a number of steps, or ``After("epoch", ...)``.

    Raises:
        ConfigError: ``first`` keeps per rank what must be equal on all ranks for ``then``.

    >>> world = World(switch("none", TopK(density=0.5), start=1), size=1)
    >>> [world.exchange([np.array([4.0, 1.0])])[0].mean.tolist() for step in range(2)]
    [[4.0, 1.0], [4.0, 0.0]]
    """

    first: Compressor
    then: Compressor
    start: Start = dataclasses.field(metadata=converted(as_start))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_parts()

    @property
    def _parts(self) -> tuple[Compressor, ...]:
        return self.first, self.then

    def for_tensor(self, name: str, shape: tuple[int, ...]) -> Compressor:
        first, then = (self._with_momentum(part.for_tensor(name, shape)) for part in self._parts)
        return dataclasses.replace(self, first=first, then=then)

    def init(self, gradient: Array) -> State:
        first, then = self.first.init(gradient), self.then.init(gradient)
        differ = self.first.per_rank(gradient) - self.then.per_rank(gradient)
        if clash := sorted(differ & then.keys()):
            raise ConfigError(
                f"{clash[0]!r} differs between ranks under {self.first.name}, and must be equal on "
                f"all under {self.then.name}. Switch the other way round, or let a density of "
                "DGC rise to 1 instead"
            )
        return {**first, **then}

    def common(self, gradient: Array) -> State:
        return {**self.first.common(gradient), **self.then.common(gradient)}

    def repaired(self, gradient: Array, state: State) -> State:
        return self.then.repaired(gradient, self.first.repaired(gradient, state))

    def per_rank(self, gradient: Array) -> frozenset[str]:
        return self.first.per_rank(gradient) | self.then.per_rank(gradient)

    def rows_at(self, context: Context) -> str:
        return self._now(context).rows_at(context)

    def _now(self, context: Context) -> Compressor:
        return self.then if started(self.start, context.step, context.epoch) else self.first

    def exchange(self, gradient: Array, state: State, context: Context) -> Exchange:
        outcome = yield from self._now(context).exchange(gradient, state, context)
        return outcome._replace(state={**state, **outcome.state})

    def place(self, gradient: Array, context: Context) -> Place | None:
        return self._now(context).place(gradient, context)

    def encode(self, gradient: Array, state: State, context: Context) -> Encoded:
        encoded = self._now(context).encode(gradient, state, context)
        return encoded._replace(state={**state, **encoded.state})

    def decode(self, message: Array, like: Array, context: Context) -> Array:
        return self._now(context).decode(message, like, context)


def partition(*rules: Any, otherwise: Any = "none") -> Partition:
    """Return a method that treats tensors by their names and shapes::

        compression=hvd.partition(
            ("*.bias", "none"),
            hvd.rule(hvd.PowerSGD(rank=4), ndim=2, min_size=10_000),
            otherwise=hvd.TopK(density=0.01),
        )

    Args:
        rules: :class:`rule`, or pairs of a shell pattern of names and a method; the first that fits
            decides.
        otherwise: the method for tensors that no rule fits.  Methods may be texts.
    """
    found = [
        entry if isinstance(entry, rule) else rule(as_compressor(entry[1]), entry[0])
        for entry in rules
    ]
    return Partition(tuple(found), as_compressor(otherwise))


def switch(first: Any, then: Any, start: Start) -> Switch:
    """Return a method that changes once, such as a dense start: ``switch("none", DGC, start=500)``.

    Args:
        first, then: methods, their classes, or texts.
        start: a number of steps, or ``After("epoch", ...)``.
    """
    return Switch(as_compressor(first), as_compressor(then), start)
