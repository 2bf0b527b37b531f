"""Checks of checkpoints, and the share of a saved residual that each rank takes over.

Residuals differ between ranks, and users save rank 0 only.  Training depends on the mean residual
over the ranks; a checkpoint that holds the mean can be loaded by any number of ranks.  A checkpoint
with a single rank's own state can be loaded by that rank.

Files are cut off, mixed up and edited.  All of a state is checked with the functions below before
anything is assigned, so that a state that is refused leaves everything as it was.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

from hvd_compress.backends import backend_of
from hvd_compress.base import Array
from hvd_compress.config import is_number, is_whole
from hvd_compress.errors import ConfigError, UnsupportedError


def refused(problem: str) -> ConfigError:
    """Return the error for a state that cannot be loaded."""
    return ConfigError(f"this state cannot be loaded, and nothing was changed: {problem}")


def entry(state: Any, key: Any, kind: type | tuple[type, ...], *, of: str = "it") -> Any:
    """Return ``state[key]``, which must be an instance of ``kind``."""
    if not isinstance(state, Mapping):
        raise refused(f"{of} is {_look(state)} where a dict was expected")
    if key not in state:
        raise refused(f"{of} has no {key!r}")
    if not isinstance(state[key], kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        names = " or ".join(k.__name__ for k in kinds)
        raise refused(f"{key!r} is {_look(state[key])} where {names} was expected")
    return state[key]


def whole(state: Any, key: str, least: int = 0) -> int:
    """Return ``state[key]``, which must be a whole number, ``least`` or more."""
    value = entry(state, key, object)
    if not is_whole(value) or value < least:
        raise refused(f"{key!r} is {_look(value)} where a whole number from {least} was expected")
    return value


def epoch_in(state: Any) -> Any:
    """Return the epoch that was announced, or ``None``."""
    value = entry(state, "epoch", object)
    if value is not None and not (is_number(value) and math.isfinite(value) and value >= 0):
        raise refused(f"'epoch' is {_look(value)} where a number from 0, or None, was expected")
    return value


def saver_in(state: Any) -> dict[str, Any]:
    """Return by whom the state was saved: "consolidated", "rank" and "size"."""
    saved = {
        "consolidated": bool(entry(state, "consolidated", (bool, int))),
        "rank": whole(state, "rank"),
        "size": whole(state, "size", 1),
    }
    if saved["rank"] >= saved["size"]:
        raise refused(f"it was saved by rank {saved['rank']} of {saved['size']}")
    return saved


def check_array(what: str, x: Any, n: int | None = None) -> Array:
    """Return ``x``, which must be an array of ``n`` finite floating-point numbers (``None``: of any
    number)."""
    try:
        xp = backend_of(x)
        dtype, size = xp.dtype(x), xp.size(x)
    except (UnsupportedError, AttributeError):
        raise refused(f"{what} is {_look(x)} where an array was expected") from None
    if "float" not in dtype:
        raise refused(f"{what} has elements of {dtype} where floating-point numbers were expected")
    if n is not None and size != n:
        raise refused(
            f"{what} has {size} elements instead of {n}: it belongs to another model, or to other "
            "options"
        )
    try:
        xp.check_gradient(x)
    except UnsupportedError:  # sparse, quantised, or without memory, as on the device "meta"
        raise refused(f"{what} is no plain dense array: {_look(x)}") from None
    if not bool(xp.all_finite(x)):
        raise refused(f"{what} has elements that are NaN or Inf")
    return x


def _look(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) < 60 else text[:60] + ' ...'}"


def unconsolidated(call: str) -> str:
    """Return the warning for saving a state that is one rank's own."""
    return (
        f"this state holds the residuals of this rank only. Call {call} on every rank before "
        "rank 0 saves; or save every rank's own and load it on the same rank"
    )


def lost(where: str) -> str:
    """Return the warning for a state in which residuals are missing; ``where``: what it holds."""
    return (
        f"this state holds what waited on {where} only; the residuals of the other ranks are "
        "lost. Before saving on one rank, consolidate on every rank: "
        "optimizer.consolidate_state_dict() in PyTorch, optimizer.compression.consolidate() in "
        "Keras"
    )


def share(engine: Any, saved: Mapping[str, Any]) -> float:
    """Return the factor by which this rank multiplies saved residuals, so that nothing is counted
    twice.

    Args:
        saved: "consolidated", and the "rank" and "size" of the rank that saved; empty if unknown.
    """
    if not saved or saved["consolidated"] or saved["size"] == 1:
        return 1.0
    if saved["size"] == engine.size and saved["rank"] == engine.rank:
        return 1.0
    warnings.warn(lost(f"rank {saved['rank']} of {saved['size']}"), UserWarning, stacklevel=4)
    return engine.size / saved["size"] if engine.rank == saved["rank"] else 0.0
