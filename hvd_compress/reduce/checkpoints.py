"""Checkpoints of a reducer that keeps its states in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hvd_compress.backends import backend_of
from hvd_compress.base import State
from hvd_compress.integrations.checkpoints import check_array, entry, epoch_in, refused, whole
from hvd_compress.reduce.store import MemoryStore, misfit

if TYPE_CHECKING:
    from hvd_compress.reduce.reducer import Reducer

_VERSION = 1


def saved(reducer: Reducer, store: MemoryStore, consolidate: bool) -> dict[str, Any]:
    """Return what ``Reducer.state_dict`` returns."""
    states = {name: dict(state) for name, state in store.states.items()}
    if consolidate and reducer.engine.size > 1:
        _consolidate(reducer, store, states)
    return {
        "version": _VERSION,
        "method": reducer.compression.to_config(),
        **({} if reducer.chooser is None else {"choice": reducer.chooser.state()}),
        "step": reducer.step,
        "epoch": reducer.epoch,
        "seed": reducer.seed,
        "per_rank": {name: sorted(keys) for name, keys in store.per_rank.items()},
        "states": {
            name: {key: backend_of(x).copy(x) for key, x in state.items()}
            for name, state in states.items()
        },
    }


def _consolidate(reducer: Reducer, store: MemoryStore, states: dict[str, State]) -> None:
    own = {f"{n}\n{key}": states[n][key] for n in states for key in store.per_rank[n]}
    for label, mean in reducer.average(own).items():
        name, key = label.split("\n")
        states[name][key] = mean


def load(reducer: Reducer, store: MemoryStore, state_dict: Mapping[str, Any]) -> None:
    """Restore what :func:`saved` returned, or raise ``ConfigError`` and change nothing."""
    version = whole(state_dict, "version")
    if version != _VERSION:
        raise refused(f"it has version {version}, not {_VERSION}")
    method = entry(entry(state_dict, "method", Mapping), "method", str)
    if method != reducer.compression.name:
        raise refused(f"it is of {method}, and the method here is {reducer.compression.name}")
    chooser = reducer.chooser and reducer.chooser.read(state_dict.get("choice"))
    step, epoch = whole(state_dict, "step"), epoch_in(state_dict)
    seed = whole(state_dict, "seed", -(2**63))
    states, per_rank = _loaded(state_dict)
    looks = store.looks.of_states() if chooser is None or chooser.method == reducer.method else {}
    for name, expected in looks.items():  # others: with their first gradient
        loaded = reducer.homes.own(name, entry(states, name, dict))
        if problem := misfit(loaded, expected):
            raise refused(f"of {name!r} {problem}")
    reducer.abandon()
    if chooser is not None:
        reducer.take_chooser(chooser)
    reducer.step, reducer.epoch, reducer.seed = step, epoch, seed
    store.replace(states, per_rank)


def _loaded(
    state_dict: Mapping[str, Any],
) -> tuple[dict[str, State], dict[str, frozenset[str]]]:
    """Return copies of the arrays, and the keys that differ between ranks, both by name."""
    states: dict[str, State] = {}
    per_rank: dict[str, frozenset[str]] = {}
    everything = entry(state_dict, "states", Mapping)
    differing = entry(state_dict, "per_rank", Mapping)
    if differing.keys() != everything.keys():
        raise refused("'per_rank' and 'states' are of different tensors")
    for name in everything:
        state, keys = entry(everything, name, Mapping), entry(differing, name, (list, tuple))
        if not all(isinstance(key, str) and key in state for key in keys):
            raise refused(f"'per_rank' names keys that the state of {name!r} has not")
        states[name] = {}
        for key, x in state.items():
            check_array(f"{key!r} of {name!r}", x)
            states[name][key] = backend_of(x).copy(x)
        per_rank[name] = frozenset(keys)
    return states, per_rank
