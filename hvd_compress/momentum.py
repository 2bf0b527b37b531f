"""What bindings to optimizers say about momentum that moves into a method."""

from __future__ import annotations

from collections.abc import Iterable

from hvd_compress.base import Compressor
from hvd_compress.errors import ConfigError


def check_one_momentum(method: Compressor, theirs: float) -> None:
    """Raise if both the method and the optimizer name one."""
    own = getattr(method, "momentum", None)
    if method.takes_momentum and own is not None and theirs not in (0, own):
        raise ConfigError(
            f"two momenta: {theirs} in the optimizer and {own} in {type(method).__name__}; leave "
            "one of them out"
        )


def another_kind(method: Compressor, optimizer: str) -> str:
    """A warning for optimizers that are not SGD."""
    return (
        f"{method.name} corrects the momentum of SGD, and {optimizer} has another kind: it gets "
        f"error feedback without momentum correction. If that is what you want, say so with "
        f"{type(method).__name__}(momentum=0.0)"
    )


def moved(method: Compressor, momenta: Iterable[float], nesterov: bool, optimizer: str) -> str:
    """A line for the log."""
    return (
        f"momentum {', '.join(map(str, momenta))}{' (Nesterov)' if nesterov else ''} of "
        f"{optimizer} now acts inside {method.name}; the optimizer's own is off during step()"
    )
