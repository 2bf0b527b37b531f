"""The form of a saved state, its checks, and the one way back from it.

Every state, whoever keeps it, begins with the same header: version, method, step, epoch, seed, and
the rank that saved it.  :meth:`StateHeader.saved` writes it and :func:`read_header` checks it.

Residuals differ between ranks, and users save rank 0 only.  Training depends on the mean residual
over the ranks; a checkpoint that holds the mean can be loaded by any number of ranks.  A checkpoint
with a single rank's own state can be loaded by that rank.  :meth:`StateHeader.share` says how much
of a residual a rank takes over, so that nothing is counted twice.

Files are cut off, mixed up and edited.  All of a state is checked with the functions below before
anything is assigned.  A state that is refused leaves everything as it was.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Compressor, Outcome, State
from hvd_compress.config import is_number, is_whole
from hvd_compress.engines.base import Engine
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.requests import Sum

VERSION = 1


class StateHeader(NamedTuple):
    """The beginning of every state.

    Attributes:
        method: the configuration of the method, which has its name under "method".
        step: the number of steps so far.
        rank, size: the rank that saved it, and their number.
        consolidated: the entries that differ between ranks are means over the ranks.
        epoch: the epoch that was announced, or ``None``.
        seed: the seed of random numbers that the ranks share; 0 if there are none.
        choice: the method that was chosen and why, not checked; ``None`` if it is not chosen.
    """

    method: Mapping[str, Any]
    step: int
    rank: int
    size: int
    consolidated: bool
    epoch: float | None = None
    seed: int = 0
    choice: Any = None

    def saved(self) -> dict[str, Any]:
        """Return the entries that :func:`read_header` reads."""
        own = {"version": VERSION, **self._asdict()}
        return {key: x for key, x in own.items() if key != "choice" or x is not None}

    def is_own(self, engine: Engine) -> bool:
        """Return whether this rank, of as many, has saved the state."""
        return (self.rank, self.size) == (engine.rank, engine.size)

    def share(self, engine: Engine) -> float:
        """Return the factor by which this rank multiplies saved residuals, so that nothing is
        counted twice."""
        if self.consolidated or self.size == 1 or self.is_own(engine):
            return 1.0
        warnings.warn(lost(f"rank {self.rank} of {self.size}"), UserWarning, stacklevel=4)
        return engine.size / self.size if engine.rank == self.rank else 0.0


def header_of(reducer: Any, consolidated: bool) -> dict[str, Any]:
    engine, choice = reducer.engine, reducer.choice
    return StateHeader(
        reducer.compression.to_config(),
        reducer.step,
        engine.rank,
        engine.size,
        consolidated,
        reducer.epoch,
        reducer.seed,
        None if choice is None else choice.state(),
    ).saved()


def read_header(state: Any) -> StateHeader:
    """Return the header of a state, or raise ``ConfigError``."""
    if (version := whole(state, "version")) != VERSION:
        raise refused(f"it has version {version}; known is {VERSION}")
    method = entry(state, "method", Mapping)
    entry(method, "method", str, of="'method'")
    epoch = entry(state, "epoch", object)
    if epoch is not None and not (is_number(epoch) and math.isfinite(epoch) and epoch >= 0):
        raise refused(f"'epoch' is {_look(epoch)} where a number from 0, or None, was expected")
    rank, size = whole(state, "rank"), whole(state, "size", 1)
    if rank >= size:
        raise refused(f"it was saved by rank {rank} of {size}")
    consolidated = bool(entry(state, "consolidated", (bool, int)))
    step, seed = whole(state, "step"), whole(state, "seed", -(2**63))
    return StateHeader(method, step, rank, size, consolidated, epoch, seed, state.get("choice"))


def restored(
    name: str,
    method: Compressor,
    like: Array,
    entries: Mapping[str, Any],
    *,
    fresh: State,
    common: State,
    more: Mapping[str, Array],
    per_rank: frozenset[str],
    factor: float,
    kinds: type | tuple[type, ...],
    place: Callable[[Any, Array], Array],
) -> tuple[State, list[str]]:
    """Return the state of a tensor from saved entries, and the keys of those that have no use here.
    Missing ones begin again.

    Args:
        name: of the tensor, for errors.
        method: that of this tensor.
        like: the tensor, or zeros like it.
        entries: arrays by key.
        fresh: the state of a tensor in the beginning.
        common: the entries that the tensor keeps for others, too, in the beginning.
        more: arrays that look like further entries that fit, by key.
        per_rank: the keys under which ranks differ.
        factor: the share of this rank in these; see :meth:`StateHeader.share`.
        kinds: of arrays that may be taken up.
        place: makes an array like the second from the first, in memory of its own.
    """
    templates = {**fresh, **common, **more}
    if 0 < len(missing := sorted(common.keys() - entries.keys())) < len(common):
        raise refused(f"the state of {name!r} has no {missing[0]!r}, but the others of its kind")
    state = dict(fresh) if entries else {}
    for key in (known := [key for key in entries if key in templates]):
        template, what = templates[key], f"{key!r} of {name!r}"
        if not isinstance(entries[key], kinds):
            names = " or ".join(
                k.__name__ for k in (kinds if isinstance(kinds, tuple) else (kinds,))
            )
            raise refused(f"{what} is {_look(entries[key])} where {names} was expected")
        check_array(what, entries[key], backend_of(template).size(template))
        # Whose dtype may have less room.
        state[key] = check_array(what, place(entries[key], template))
        if key in per_rank and factor != 1:
            state[key] = state[key] * factor
    # Even if it is this rank's own: that of others may be lost.
    state = method.repaired(like, state) if state else state
    return state, [key for key in entries if key not in known]


def averaged(x: Array, size: Any) -> Generator[Sum, Any, Outcome]:
    """Average ``x`` over ``size`` ranks, in its own dtype, as one exchange."""
    total = yield Sum(x)
    return Outcome(backend_of(x).divided(total, size), x, {})


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
        "Keras, state_dict() without consolidate=False for reducers and hooks"
    )
