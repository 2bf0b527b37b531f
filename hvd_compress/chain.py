"""Composition: local transforms before and after one way of aggregating.

``chain(momentum_correction, error_feedback, via=allgather(top_k))`` reads in the order in which the
blocks are applied to a gradient.  After the exchange the transforms ``settle`` in reverse order:
that is how error feedback and momentum factor masking learn what was sent.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Generator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import (
    Array,
    Coding,
    Compressor,
    Context,
    Encoded,
    Exchange,
    Form,
    Outcome,
    Place,
    Sparse,
    State,
)
from hvd_compress.codecs.selector import Classes
from hvd_compress.config import Configurable, as_tuple, converted
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.requests import Request


class Transform(Configurable, kind="block"):
    """A local step on a dense array, which is flat and float32 or wider, before and after the
    exchange.  Subclasses are frozen dataclasses.

    >>> state = {"residual": np.array([0.0, 1.0])}
    >>> x, state = error_feedback().update(np.array([4.0, 1.0]), state, Context())
    >>> x, error_feedback().settle(np.array([4.0, 0.0]), state, Context())
    (array([4., 2.]), {'residual': array([0., 2.])})
    """

    #: the names of its state, arrays as large as the gradient; unique within a chain
    keys: ClassVar[tuple[str, ...]] = ()
    #: the state differs between ranks
    per_rank: ClassVar[bool] = True
    #: keys of the state that are equal on all ranks even so
    shared: ClassVar[tuple[str, ...]] = ()
    #: of a transform that takes momentum; ``None`` means the optimizer's
    momentum: float | None = None
    nesterov: bool | None = None
    #: what ``finish`` returns is additive: see :class:`hvd_compress.base.Outcome`
    additive: ClassVar[bool] = True
    #: the error of one message is added to later ones (error feedback), which converges only for
    #: operators whose error is smaller than their input
    feeds_back: ClassVar[bool] = False
    #: the transform must come before one that feeds back
    of_gradients: ClassVar[bool] = False
    #: the result is not a gradient, so this must be the last transform
    last: ClassVar[bool] = False
    #: each element depends on the same element of gradient, state, what was sent and the average
    #: alone, and on the step, the momentum and its Nesterov flag
    elementwise: bool = False

    def update(self, x: Array, state: State, context: Context) -> tuple[Array, State]:
        """Return the transformed ``x`` and the new state, before the exchange.

        Neither ``x`` nor the old state may be changed in place: in a non-finite step every rank
        goes back to the old state.
        """
        return x, state

    def settle(self, sent: Array | Sparse, state: State, context: Context) -> State:
        """Return the new state after the exchange, given what was sent.  Arrays that ``update``
        made may be changed in place."""
        return state

    def repaired(self, state: State) -> State:
        """Return the state under this transform's own keys, after a checkpoint was loaded; see
        :meth:`hvd_compress.base.Compressor.repaired`."""
        return state

    @property
    def finishes(self) -> bool:
        """Whether the direction of the step is not the average."""
        return type(self).finish is not Transform.finish

    def finish(self, mean: Array, state: State, context: Context) -> tuple[Array, State]:
        """Return the direction of the optimizer's step, given the average, and the new state; both
        are equal on all ranks."""
        return mean, state


class Aggregated(NamedTuple):
    """The result of an aggregator.

    Attributes:
        mean: the flat average.
        sent: this rank's contribution to it.
        finite: whether all ranks' contributions were finite: a bool, or a symbol of one.
        state: the aggregator's new state.
        update: the direction of the step, if it is not the average; the same on all ranks.
    """

    mean: Array
    sent: Array | Sparse
    finite: Any
    state: State = {}
    update: Array | None = None


Aggregation = Generator[Request, Any, Aggregated]


class Aggregator(Configurable, abc.ABC, kind="block"):
    """A way of averaging the ranks' contributions; each is a file in
    ``hvd_compress.meetings``.  Subclasses are frozen dataclasses.

    >>> world = World(chain(via=allreduce()), size=2)
    >>> isinstance(allreduce(), Aggregator), world.exchange([np.zeros(2), np.ones(2)])[0].mean
    (True, array([0.5, 0.5]))
    """

    #: what is sent is scaled, so that its expectation is the gradient
    unbiased: bool = False
    #: the names of its state, arrays of any size, and of what :meth:`common` returns; unique within
    #: a chain
    keys: ClassVar[tuple[str, ...]] = ()
    #: the state differs between ranks
    per_rank: ClassVar[bool] = True

    def init(self, x: Array, shape: tuple[int, ...]) -> State:
        """Return the state before the first exchange of a tensor of ``shape``; ``x`` is the tensor,
        flat."""
        return {}

    def common(self, x: Array) -> State:
        """Return what the flat tensor ``x`` shares with others; see
        :meth:`hvd_compress.base.Compressor.common`.  The state that ``aggregate`` gets may have
        these entries or not, and it returns them for one of the tensors."""
        return {}

    @abc.abstractmethod
    def aggregate(self, x: Array, state: State, context: Context) -> Aggregation:
        """Average the flat array ``x`` over the ranks, as a generator of requests.  Neither ``x``
        nor ``state`` may be changed in place.  ``context.shape`` is the shape of the tensor."""

    def coding(self, n: int, context: Context) -> Coding:
        """Return how a rank's contribution of ``n`` elements becomes a message that stands alone.

        Raises:
            UnsupportedError: it takes all ranks to know what is sent.
        """
        raise UnsupportedError(f"{self.name} takes all ranks to know what is sent")

    def fused(self, transforms: Sequence[Transform], context: Context) -> Form | None:
        """Return the form of a chain of ``transforms`` and this aggregator for whole buckets, if
        there is one.  It may depend on the context's Nesterov flag and number of ranks alone:
        momentum is a number that may change in every step."""
        return None

    def check_feedback(self, shape: tuple[int, ...], context: Context) -> None:
        """Raise ``ConfigError`` unless error feedback converges with this aggregator for a tensor
        of ``shape``."""

    def classes(self, d: int, context: Context | None = None) -> Classes:
        """Return the constants of the operator that a rank applies to ``d`` elements; ``context``
        is needed if they depend on the step."""
        raise UnsupportedError(f"no constants are known for {self!r}")


class _Sending(NamedTuple):
    """A gradient on its way, with all that belongs to it.

    Attributes:
        x: the flat input of the aggregator.
        own: the aggregator's state.
        states, old: the states of the transforms, now and before the step.
        context: with the gradient's dtype and shape.
    """

    x: Array
    own: State
    states: list[State]
    old: State
    context: Context


@dataclasses.dataclass(frozen=True)
class Chain(Compressor, name="chain"):
    """A method made of blocks, whose state it has; :func:`chain` makes it.

    Options:
        transforms: in the order in which they are applied to a gradient.
        via: an aggregator.

    Raises:
        ConfigError: blocks in an order that means nothing, or that do the same twice.

    >>> chain(error_feedback(), momentum_correction(), via=allgather(top_k(0.5)))
    Traceback (most recent call last):
        ...
    hvd_compress.errors.ConfigError: momentum_correction must stand before error_feedback, or it
    would act on what waits again at every step
    """

    transforms: tuple[Transform, ...] = dataclasses.field(
        metadata=converted(as_tuple("transforms"))
    )
    via: Aggregator

    is_steady = True  # as all aggregators are that have a fused form

    def __post_init__(self) -> None:
        super().__post_init__()
        for transform in self.transforms:
            if not isinstance(transform, Transform):
                raise ConfigError(f"{transform!r} is not a transform; aggregators go after via=")
        if not isinstance(self.via, Aggregator):
            raise ConfigError(f"via={self.via!r} is not an aggregator: allreduce() or allgather()")
        keys = [key for part in self._parts for key in part.keys]
        for i, transform in enumerate(self.transforms):
            earlier = next((t for t in self.transforms[:i] if t.feeds_back), None)
            if transform.of_gradients and earlier:
                raise ConfigError(
                    f"{transform.name} must stand before {earlier.name}, or it would act on what "
                    "waits again at every step"
                )
        for transform in self.transforms[:-1]:
            if transform.last:
                raise ConfigError(
                    f"{transform.name} must be the last transform: those after it would see what "
                    "is new about a gradient instead of a gradient"
                )
        feedbacks = [transform.name for transform in self.transforms if transform.feeds_back]
        if feedbacks and self.via.unbiased:
            raise ConfigError("error feedback needs elements as they are: unbiased=False")
        if len(feedbacks) > 1:
            raise ConfigError(f"{' and '.join(feedbacks)} do the same in two ways: take one")
        if twice := {key for key in keys if keys.count(key) > 1}:
            raise ConfigError(f"two blocks of one chain keep a {twice.pop()!r}")

    def repaired(self, gradient: Array, state: State) -> State:
        for transform in self.transforms:
            own = {key: state[key] for key in transform.keys if key in state}
            state = {**state, **(transform.repaired(own) if own else own)}
        return state

    @property
    def momentum(self) -> float | None:  # type: ignore[override]
        return next((t.momentum for t in self.transforms if t.takes_momentum), None)

    @property
    def nesterov(self) -> bool | None:  # type: ignore[override]
        return next((t.nesterov for t in self.transforms if t.takes_momentum), None)

    @property
    def _parts(self) -> tuple[Transform | Aggregator, ...]:
        return (*self.transforms, self.via)

    def per_rank(self, gradient: Array) -> frozenset[str]:
        shared = {key for transform in self.transforms for key in transform.shared}
        keys = (key for part in self._parts if part.per_rank for key in part.keys)
        return frozenset(keys) - shared

    def init(self, gradient: Array) -> State:
        xp = backend_of(gradient)
        x = xp.widen(gradient)
        state = {key: xp.zeros(xp.size(x), x) for t in self.transforms for key in t.keys}
        return state | self.via.init(x, xp.shape(gradient))

    def common(self, gradient: Array) -> State:
        return self.via.common(backend_of(gradient).widen(gradient))

    def exchange(self, gradient: Array, state: State, context: Context) -> Exchange:
        xp = backend_of(gradient)
        xp.check_gradient(gradient, context.in_place)
        sending = self._sending(gradient, state, context)
        aggregated = yield from self.via.aggregate(sending.x, sending.own, sending.context)

        mean = xp.restore(aggregated.mean, gradient)
        # A half-precision gradient may have no room for the mean of residuals.
        is_wide = xp.dtype(mean) == xp.dtype(sending.x)
        finite = aggregated.finite if is_wide else xp.all_finite(mean)
        direction = aggregated.mean if aggregated.update is None else aggregated.update
        new, old = dict(aggregated.state), self._before(sending, aggregated.state)
        if not (new or old or self._has_update) and aggregated.update is None:
            return Outcome(mean, aggregated.sent, {})  # a graph has no branches then

        def settled() -> tuple[Array, State]:
            return self._settled(sending, aggregated.sent, new, direction)

        def restored() -> tuple[Array, State]:
            # If the state overflows while gradients are finite, it would overflow in every step.
            return aggregated.mean, in_range(old)

        update, new_state = xp.choose(finite, settled, restored)
        if not self._has_update and aggregated.update is None:
            return Outcome(mean, aggregated.sent, new_state)
        update = xp.restore(update, gradient)
        if not is_wide:  # nor may it have room for the momentum
            fits = xp.all_finite(update)
            new_state = xp.choose(fits, lambda: new_state, lambda: old)
        additive = all(t.additive for t in self.transforms)
        return Outcome(mean, aggregated.sent, new_state, update, additive)

    def place(self, gradient: Array, context: Context) -> Place | None:
        if (form := self._form(context)) is None:
            return None
        xp = backend_of(gradient)
        xp.check_gradient(gradient, context.in_place)
        return form.place(gradient, context._replace(shape=xp.shape(gradient)))

    def encode(self, gradient: Array, state: State, context: Context) -> Encoded:
        if self._has_update:
            raise UnsupportedError("what arrives is a momentum, which receivers would have to keep")
        xp = backend_of(gradient)
        xp.check_gradient(gradient)
        sending = self._sending(gradient, state, context)
        coding = self.via.coding(xp.size(sending.x), sending.context)
        message, sent, own = coding.encode(sending.x, sending.own, sending.context)
        old = self._before(sending, own)
        values = sent.values if isinstance(sent, Sparse) else sent
        new_state = xp.choose(
            xp.all_finite(xp.cast(values, xp.dtype(gradient))),
            lambda: self._settled(sending, sent, dict(own), sending.x)[1],
            lambda: in_range(old),
        )
        return Encoded(message, sent, new_state)

    def decode(self, message: Array, like: Array, context: Context) -> Array:
        xp = backend_of(like)
        x = xp.widen(like)
        context = context._replace(dtype=xp.dtype(like), shape=xp.shape(like))
        coding = self.via.coding(xp.size(x), context)
        return xp.restore(coding.decode([message], x, context, [context.rank]).total, like)

    def _sending(self, gradient: Array, state: State, context: Context) -> _Sending:
        xp = backend_of(gradient)
        x = xp.widen(gradient)
        states = []
        for transform in self.transforms:
            x, own = transform.update(x, {key: state[key] for key in transform.keys}, context)
            states.append(own)
        # Whatever the aggregator selects, the others must see that this step is not finite.
        fresh = x
        x = xp.choose(xp.all_finite(x), lambda: fresh, lambda: xp.full_like(fresh, math.nan))

        # Bindings keep arrays of their own beside these, and what is common may not be there yet.
        own = {key: state[key] for key in self.via.keys if key in state}
        old = {key: state[key] for transform in self.transforms for key in transform.keys}
        context = context._replace(dtype=xp.dtype(gradient), shape=xp.shape(gradient))
        if any(transform.feeds_back for transform in self.transforms):
            self.via.check_feedback(context.shape, context)
        return _Sending(x, own, states, old, context)

    def _before(self, sending: _Sending, state: State) -> State:
        """The state before the step, with the entries that the aggregator has returned."""
        own = sending.own
        return sending.old | {key: own[key] for key in state if key in own}

    def _settled(
        self, sending: _Sending, sent: Array | Sparse, state: State, update: Array
    ) -> tuple[Array, State]:
        """The direction of the step, and the new state: the aggregator's, and the transforms'."""
        own_states = zip(reversed(self.transforms), reversed(sending.states), strict=True)
        for transform, own in own_states:
            own = transform.settle(sent, own, sending.context)
            update, own = transform.finish(update, own, sending.context)
            state.update(own)
        return update, state

    def _form(self, context: Context) -> Form | None:
        token = context.nesterov, context.size
        if token not in self._forms:
            # Of two threads that make it at once, both take one: a bucket is of one form.
            return self._forms.setdefault(token, self.via.fused(self.transforms, context))
        return self._forms[token]

    @functools.cached_property
    def _forms(self) -> dict[Any, Form | None]:
        return {}

    @functools.cached_property
    def _has_update(self) -> bool:
        return any(t.finishes for t in self.transforms)


def in_range(state: State) -> State:
    """Return a state without too large elements.  Elements that would overflow when a few ranks'
    are added become the largest ones that do not."""
    return {key: _in_range(x) for key, x in state.items()}


def _in_range(x: Array) -> Array:
    xp = backend_of(x)
    if not xp.dtype(x).startswith("float"):
        return x
    floor = xp.full_like(x, -float(np.finfo(xp.dtype(x)).max) * 2.0**-24)
    return -xp.maximum(-xp.maximum(x, floor), floor)


def chain(*transforms: Transform, via: Aggregator) -> Chain:
    """Return a :class:`Chain`, written in one line.

    Args:
        transforms: in the order in which they are applied; any number of them.
        via: the aggregator.

    >>> world = World(chain(error_feedback(), via=allgather(top_k(0.5))), size=1)
    >>> [world.exchange([np.array([4.0, 3.0])])[0].mean.tolist() for step in range(2)]
    [[4.0, 0.0], [0.0, 6.0]]
    """
    return Chain(transforms, via)
