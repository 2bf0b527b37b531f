"""Checks and messages of the bindings to optimizers, about momentum that a method takes over."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from hvd_compress.base import Compressor
from hvd_compress.errors import ConfigError


def velocity_of_one(momentum: float, nesterov: bool) -> float:
    """Return the velocity that has the effect of a momentum buffer of 1 in plain SGD: Nesterov
    velocities have a factor m."""
    return momentum if nesterov else 1.0 if momentum else 0.0


def check_one_momentum(method: Compressor, theirs: float) -> None:
    """Raise ``ConfigError`` if the method and the optimizer have different momenta."""
    own = method.momentum
    if method.takes_momentum and own is not None and theirs not in (0, own):
        raise ConfigError(
            f"two momenta: {theirs} in the optimizer and {own} in {type(method).__name__}; leave "
            "one of them out"
        )


def check_partner(method: Compressor, optimizer: Any, group: Mapping[str, Any] | None) -> None:
    """Raise ``ConfigError`` if the optimizer would take the method's momenta for gradients.

    Args:
        optimizer: the user's optimizer; ``None`` if it is not known.
        group: a parameter group of the optimizer, if it has groups.
    """
    if method.partner is None:
        return
    if method.partner not in [cls.__name__ for cls in type(optimizer).__mro__]:
        whom = "an optimizer" if optimizer is None else type(optimizer).__name__
        raise ConfigError(
            f"{method.name} hands out momenta, which {whom} would take for gradients: write "
            f"own = hvd.{method.partner}(...) and hvd.DistributedOptimizer(own, "
            "compression=own.compressor())"
        )
    wanted = optimizer.compression_options(*([] if group is None else [group]))
    if dataclasses.replace(method, **wanted) != method:  # type: ignore[type-var]
        options = ", ".join(f"{name}={value}" for name, value in wanted.items())
        raise ConfigError(
            f"{method!r} does not fit to {method.partner} with {options}: pass compression="
            "optimizer.compressor(), and the same options to all parameters"
        )


def another_kind(method: Compressor, optimizer: str) -> str:
    """Return the warning for optimizers that are not SGD."""
    return (
        f"{method.name} corrects the momentum of SGD, and {optimizer} has another kind: it gets "
        f"error feedback without momentum correction. If that is what you want, say so with "
        f"{type(method).__name__}(momentum=0.0)"
    )


#: what divides by the size of gradients, or takes their signs or directions, by names of classes
NOT_LINEAR = frozenset(
    (
        *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "LAMB", "Lion"),
        *("Muon", "NAdam", "Nadam", "RAdam", "RMSprop", "Rprop"),
    )
)


def too_coarse(method: Compressor, optimizer: Any) -> str | None:
    """Return the warning for an optimizer that makes steps of any size of what a coarse method
    sends late or in a bit, or ``None``."""
    kinds = {cls.__name__ for cls in type(optimizer).__mro__}
    if not method.is_coarse or method.partner is not None or not kinds & NOT_LINEAR:
        return None
    return (
        f"{method.name} under {type(optimizer).__name__} costs much accuracy (docs/accuracy.md): "
        "what it sends late or in a bit arrives in bursts, and the optimizer is not linear in the "
        'gradient. Write compression="linear"; or method=hvd.LocalSGD(sync_every=2, '
        'unsent="stays", compression="onebit:column=512,via=allgather"), whose feedback is after '
        "the optimizer; or another optimizer. Where it is on purpose, "
        "warnings.simplefilter('ignore', hvd_compress.NeedsTuning)"
    )


def moved(method: Compressor, momenta: Iterable[float], nesterov: bool, optimizer: str) -> str:
    """Return the log line for momentum that a method has taken over."""
    return (
        f"momentum {', '.join(map(str, momenta))}{' (Nesterov)' if nesterov else ''} of "
        f"{optimizer} now acts inside {method.name}; the optimizer's own is off during step()"
    )
