"""Optimizers of ``torch.optim`` that step by a formula of :mod:`hvd_compress.optimizers`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch

from hvd_compress.errors import ConfigError
from hvd_compress.optimizers import Formula, Now
from hvd_compress.optimizers.base import documented

from ..eager import run_eagerly

_PARAMS = """\
``params`` are those of the model, floats of any shape, or groups of them with options of their own,
as for every optimizer of ``torch.optim``."""


class FormulaOptimizer(torch.optim.Optimizer):
    """Steps by a formula, one tensor after the other.

    A parameter group has all options of the formula, and ``optimizer.state[p]`` its state.

    Args:
        params: as for every optimizer; a group may have options of its own.
        options: those of the formula, in its order or by name.
    """

    formula: ClassVar[type[Formula]]

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "formula" in vars(cls):
            params = inspect.Parameter("params", inspect.Parameter.POSITIONAL_OR_KEYWORD)
            options = inspect.signature(cls.formula).parameters.values()
            cls.__signature__ = inspect.Signature([params, *options])  # type: ignore[attr-defined]
            cls.__doc__ = f"{documented(cls)}\n\n{_PARAMS}"

    def __init__(self, params: Iterable[Any], *options: Any, **named: Any) -> None:
        # Horovod makes its optimizer from the parameter groups alone: all options are there.
        super().__init__(params, self.formula(*options, **named).options())
        run_eagerly(type(self), "step")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step along what is in ``p.grad``; return the loss of the closure, if there is
        one."""
        loss = loss_of(closure)
        self.begin_step()
        for group in self.param_groups:
            formula = self.formula_of(group)
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, formula)
        return loss

    def begin_step(self) -> None:
        """Prepare a step of all parameters."""

    def formula_of(self, group: dict[str, Any]) -> Any:
        """Return the formula with the options that a parameter group has now."""
        names = (field.name for field in dataclasses.fields(self.formula))
        return self.formula.unchecked(**{name: group[name] for name in names})

    def update(self, p: torch.Tensor, formula: Formula, **flags: bool) -> None:
        """Step with one parameter; ``flags`` are of :class:`Now`."""
        gradient: Any = p.grad
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        state = self.state[p]
        for name in formula.counts:
            stays = name == "variance_step" and flags.get("frozen", False)
            state[name] = state.get(name, 0) + (not stays)
        keep(p, *formula.step(p, gradient, state, now_of(state, **flags)), state)


def now_of(state: dict[str, Any], **flags: bool) -> Now:
    """Return what a formula is told of the step that a state counts."""
    return Now(state.get("step", 1), max(state.get("variance_step", 1), 1), **flags)


def keep(p: torch.Tensor, w: torch.Tensor, new: dict[str, Any], state: dict[str, Any]) -> None:
    """Put what a formula returned into the parameter and its state, into the memory that these
    have."""
    for name, x in new.items():
        known = state.get(name)
        if isinstance(known, torch.Tensor) and x is not known:
            known.copy_(x)
        else:
            state[name] = x
    if w is not p:
        p.copy_(w)


class PartnerOptimizer(FormulaOptimizer):
    """An optimizer that knows what its compression returns instead of gradients."""

    def compressor(self, **options: Any) -> Any:
        """Return the compression for this optimizer; ``options`` are those that the optimizer does
        not determine."""
        return self.formula_of(self.param_groups[0]).compressor(**options)

    def compression_options(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return the options of the compression that a parameter group determines."""
        return self.formula_of(group).compression_options()

    @property
    def binding(self) -> Any:
        """The binding of the compression that belongs to this optimizer, or ``None`` under any
        other."""
        binding = getattr(self, "compression", None)
        method: Any = self.formula.method
        return binding if binding is not None and isinstance(binding.method, method) else None


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Return the loss of the closure that ``step()`` was given, or ``None`` without one."""
    check_closure(closure)
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def check_closure(closure: Any) -> None:
    """Raise ``ConfigError`` unless this is what ``optimizer.step`` takes."""
    if closure is not None and not callable(closure):
        raise ConfigError(f"closure must be a function that returns the loss; got {closure!r}")
