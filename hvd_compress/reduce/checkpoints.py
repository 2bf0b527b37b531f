"""Checkpoints of a reducer that keeps its states in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hvd_compress.backends import backend_of
from hvd_compress.base import State
from hvd_compress.reduce.choice import Choice
from hvd_compress.reduce.state_file import check_array, entry, header_of, read_header, refused
from hvd_compress.reduce.store import MemoryStore, misfit

if TYPE_CHECKING:
    from hvd_compress.reduce.reducer import Reducer


def saved(reducer: Reducer, store: MemoryStore, consolidate: bool) -> dict[str, Any]:
    """Return what ``Reducer.state_dict`` returns."""
    states = {name: dict(state) for name, state in store.states.items()}
    if consolidate and reducer.engine.size > 1:
        own = {f"{n}\n{key}": states[n][key] for n in states for key in store.per_rank[n]}
        for label, mean in reducer.average(own).items():
            name, key = label.split("\n")
            states[name][key] = mean
    return {
        **header_of(reducer, consolidate),
        "per_rank": {name: sorted(keys) for name, keys in store.per_rank.items()},
        "states": {
            name: {key: backend_of(x).copy(x) for key, x in state.items()}
            for name, state in states.items()
        },
    }


def load(reducer: Reducer, store: MemoryStore, state_dict: Mapping[str, Any]) -> None:
    """Restore what :func:`saved` returned, or raise ``ConfigError`` and change nothing."""
    saved = read_header(state_dict)
    if (method := saved.method["method"]) != reducer.compression.name:
        raise refused(f"it is of {method}, and the method here is {reducer.compression.name}")
    choice = None if reducer.choice is None else Choice.read(saved.choice)
    everything, differing = (entry(state_dict, key, Mapping) for key in ("states", "per_rank"))
    if differing.keys() != everything.keys():
        raise refused("'per_rank' and 'states' are of different tensors")
    states: dict[str, State] = {}
    for name in everything:
        state, keys = entry(everything, name, Mapping), entry(differing, name, (list, tuple))
        if not all(isinstance(key, str) and key in state for key in keys):
            raise refused(f"'per_rank' names keys that the state of {name!r} has not")
        arrays = {key: check_array(f"{key!r} of {name!r}", x) for key, x in state.items()}
        states[name] = {key: backend_of(x).copy(x) for key, x in arrays.items()}
    looks = store.looks.of_states() if choice is None or choice.method == reducer.method else {}
    for name, expected in looks.items():  # others: with their first gradient
        loaded = reducer.homes.own(name, entry(states, name, dict))
        if problem := misfit(loaded, expected):
            raise refused(f"of {name!r} {problem}")
    inconsistent: list[str] = []
    if any(differing.values()) and (factor := saved.share(reducer.engine)) != 1:
        inconsistent = [name for name, keys in differing.items() if keys]
        for name in inconsistent:
            states[name] |= {key: states[name][key] * factor for key in differing[name]}
    reducer.abandon()
    if choice is not None:
        reducer.take_choice(choice)
    reducer.step, reducer.epoch, reducer.seed = saved.step, saved.epoch, saved.seed
    per_rank = {name: frozenset(keys) for name, keys in differing.items()}
    store.replace(states, per_rank, inconsistent)
