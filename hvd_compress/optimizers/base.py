"""Optimizers without a framework: a formula of arrays, its state and its options.

A :class:`Formula` is a function of one tensor, its gradient and its state, written over
:mod:`hvd_compress.backends`.  Each framework has one host that makes an optimizer of it, with
parameter groups, schedules and checkpoints; with NumPy it is called as it is::

    lamb, state = LAMB(lr=0.01), {}
    for number, g in enumerate(gradients, 1):
        w, state = lamb.step(w, g, state, Now(number))
"""

from __future__ import annotations

import abc
import dataclasses
import inspect
import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from hvd_compress.backends import Array, backend_of
from hvd_compress.base import Compressor
from hvd_compress.errors import ConfigError

State = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Now:
    """The circumstances of a step, for a formula.  In a graph these are symbols.

    Attributes:
        step: its number, from 1.
        variance_step: updates of the variance, that of this step included; 1 if there were none.
        frozen: the variance stays as it is.
        is_momentum: the exchange returned the new momentum instead of a gradient.
        is_local: ranks step on their own.

    In the second step the exchange returns momentum, and the variance stays as it is:

    >>> w, g = np.array([1.0]), np.array([2.0])
    >>> _, state = OneBitAdam().step(w, g, {}, Now(step=1))
    >>> _, state = OneBitAdam().step(w, g, state, Now(step=2, frozen=True, is_momentum=True))
    >>> state["exp_avg"], state["exp_avg_sq"].round(6)
    (array([2.]), array([0.004]))
    """

    step: Any = 1
    variance_step: Any = 1
    frozen: Any = False
    is_momentum: Any = False
    is_local: Any = False


class Slot(NamedTuple):
    """An entry of the state.

    Attributes:
        name: its key.
        kind: "array", as large as the parameter; "scalar", what a norm is; "number", of Python.  In
            a graph the last two are the same.
        since: the flag of :class:`Now` from which on it is needed.  A graph has it from the
            beginning, since it does not know when that will be.
        start: a number, or the entry that it begins as a copy of; in a graph the formula keeps it
            at that.

    >>> [slot.name for slot in LAMB.slots]
    ['exp_avg', 'exp_avg_sq']
    >>> OneBitLAMB.slots[2].since, OneBitLAMB.slots[2].start
    ('frozen', 'exp_avg_sq')
    """

    name: str
    kind: str = "array"
    since: str | None = None
    start: float | str = 0.0


@dataclasses.dataclass(frozen=True)
class Formula(abc.ABC):
    """Options, and :meth:`step`.  Subclasses are dataclasses, all of whose options have defaults.

    Weights, gradients and the arrays of the state have the shape and dtype of a parameter, in
    floating point.

    Options:
        lr: the learning rate, which schedules may change from step to step.

    >>> lars, w, state = LARS(lr=1.0, trust_coefficient=0.1), np.array([[3.0, 4.0]]), {}
    >>> for number in (1, 2):
    ...     w, state = lars.step(w, np.array([[1.0, 1.0]]), state, Now(number))
    >>> w.round(3), sorted(state)
    (array([[2.01, 3.01]]), ['velocity'])
    """

    #: options that are 0 or more, and finite
    not_negative: ClassVar[tuple[str, ...]] = ("lr",)
    #: the state of a parameter
    slots: ClassVar[tuple[Slot, ...]] = ()
    #: what of :class:`Now` is counted for a parameter, and saved with its state
    counts: ClassVar[tuple[str, ...]] = ()
    #: the compression that comes with it, if there is one, and what it takes of the options
    method: ClassVar[type[Compressor] | None] = None
    schedule: ClassVar[tuple[str, ...]] = ()

    lr: float = 1e-3

    def __post_init__(self) -> None:
        self.check({})

    def check(self, names: Mapping[str, str]) -> None:
        """Raise ``ConfigError`` if an option makes no sense.

        Args:
            names: those of options that are called otherwise in a framework.
        """
        options = {names.get(name, name): getattr(self, name) for name in self.not_negative}
        check_options(options, lambda value: 0 <= value < math.inf, "0 or more")

    def options(self) -> dict[str, Any]:
        """Return all options by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def unchecked(cls, **options: Any) -> Any:
        """Return the formula with these options as they are: rates of a schedule, and symbols."""
        formula = object.__new__(cls)
        vars(formula).update(options)
        return formula

    def compression_options(self) -> dict[str, Any]:
        """Return the options of its compression that the optimizer determines."""
        return {name: getattr(self, name) for name in self.schedule}

    def compressor(self, **options: Any) -> Any:
        """Return its compression; ``options`` are those that the optimizer does not determine."""
        if self.method is None:
            raise ConfigError(f"{type(self).__name__} has no compression of its own")
        return self.method(**self.compression_options(), **options)

    def step(self, w: Array, g: Array, state: State, now: Now) -> tuple[Array, State]:
        """Return weights and state after one step.

        Args:
            w: weights of one tensor, such as a layer's; like those of the state, PyTorch's may be
                written to.
            g: the gradient, or the momentum that the compression returns; it stays as it is.
            state: the state that the last step returned, and empty before the first one.
            now: the circumstances of the step.
        """
        missing = [slot for slot in self.slots if slot.name not in state]
        if missing:
            state = dict(state)
        for slot in missing:
            if slot.since is None or getattr(now, slot.since):
                state[slot.name] = _begun(slot, w, state)
        return self.update(w, g, state, now)

    @abc.abstractmethod
    def update(self, w: Array, g: Array, state: State, now: Now) -> tuple[Array, State]:
        """Do what :meth:`step` does, with all entries of the state there."""


def _begun(slot: Slot, w: Array, state: State) -> Any:
    xp = backend_of(w)
    if isinstance(slot.start, str):
        return xp.copy(state[slot.start])
    if slot.kind == "number":
        return slot.start
    return xp.full_like(w, slot.start) if slot.kind == "array" else xp.scalar(slot.start, w)


def documented(cls: Any) -> str:
    """Return the docstring of an optimizer: its own, and that of its formula.  The latter's example
    is left out, since it calls the formula."""
    formula = (inspect.getdoc(cls.formula) or "").partition("\n\n>>> ")[0]
    raises = "Raises:\n    ConfigError: an option makes no sense."
    return "\n\n".join([inspect.getdoc(cls) or "", formula, raises])


def quotient(xp: Any, numerator: Any, denominator: Any, *norms: Any) -> Any:
    """Return the quotient of scalars, 1 where one of the norms is 0."""
    positive = norms[0] > 0
    for norm in norms[1:]:
        positive = positive & (norm > 0)
    return xp.where(positive, numerator / xp.where(positive, denominator, 1.0), 1.0)


def check_options(options: Mapping[str, Any], is_good: Any, words: str) -> None:
    """Raise ``ConfigError`` unless all these options are ``words``, as ``is_good`` says."""
    for option, value in options.items():
        try:  # a tensor may be a learning rate
            good = not isinstance(value, bool) and bool(is_good(value))
        except (TypeError, ValueError, RuntimeError):  # arrays of several elements have no truth
            good = False
        if not good:
            raise ConfigError(f"{option} must be {words}; got {value!r}")
