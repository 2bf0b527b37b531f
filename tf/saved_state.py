"""The state of a binding as flat arrays, which is what all files hold.

``tf.train.Checkpoint`` and Keras's own files (``.keras``, ``.weights.h5``) hold the bytes of
:func:`to_bytes`, and both are restored by :func:`load`, which checks everything before it assigns
any.

Keras saves an optimizer's attributes that can be saved, each in a place of its own, and looks when
loading only for those that it knows: a plain optimizer finds its own variables, no more and no
less, and does not notice these.
"""

from __future__ import annotations

import io
import json
import warnings
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_compress.reduce.state_file import (
    StateHeader,
    entry,
    read_header,
    refused,
    restored,
    unconsolidated,
)

#: the name of the array that holds the header, as JSON in bytes
HEADER = "header"


def header_of(binding: Any, *, consolidated: bool) -> StateHeader:
    """Return the header of the state of a binding."""
    engine, store = binding.engine, binding.store
    epoch = float(store.epoch)
    return StateHeader(
        store.method.to_config(),
        int(store.step),
        engine.rank,
        engine.size,
        consolidated,
        None if epoch < 0 else epoch,
        store.seed,
    )


def to_arrays(binding: Any) -> dict[str, np.ndarray]:
    """Return all state of a binding as NumPy arrays by flat names."""
    own = header_of(binding, consolidated=binding.is_consolidated)
    arrays = {HEADER: np.frombuffer(json.dumps(own.saved()).encode(), np.uint8)}
    for i, state in binding.store.states.items():
        for key, variable in state.items():
            x = variable.numpy()
            # NumPy's files do not know bfloat16.
            arrays[f"{i}.{key}"] = x if x.dtype.kind == "f" else x.astype(np.float32)
    return arrays


def load(binding: Any, arrays: Mapping[str, Any]) -> None:
    """Take up what :func:`to_arrays` returned, on this rank or on another.

    Raises:
        ConfigError: it belongs to another model, or it is damaged; then nothing has changed.
    """
    if not isinstance(arrays, Mapping) or not all(isinstance(name, str) for name in arrays):
        raise refused(f"it is {type(arrays).__name__} where a dict of arrays was expected")
    text = entry(arrays, HEADER, np.ndarray).tobytes()
    try:
        own = json.loads(text)
    except (ValueError, RecursionError):
        raise refused(f"{HEADER!r} is no text in JSON") from None
    saved = read_header(own)
    if saved.seed != (here := binding.store.seed):
        raise refused(
            f"it is of seed={saved.seed}, and graphs are made with seed={here} here: pass "
            f"seed={saved.seed} to hvd.DistributedOptimizer, hvd.bind or "
            "hvd.DistributedGradientTape"
        )
    found: dict[str, dict[str, Any]] = {i: {} for i in binding.store.states}
    for name in arrays:
        if name == HEADER:
            continue
        place, _, key = name.partition(".")
        if place not in found:
            raise refused(f"{name!r} fits no variable: it belongs to another model")
        found[place][key] = arrays[name]
    restore(binding, saved, found, saved.share(binding.engine))


def restore(
    binding: Any,
    saved: StateHeader,
    found: Mapping[str, Mapping[str, Any]],
    factor: float = 1.0,
) -> None:
    """Take up a state, by whichever way it came: from a file, from other ranks, or from a plain
    optimizer.

    Args:
        saved: its header.
        found: entries, as arrays or eager tensors, by the number of the slot and key.  Missing
            ones begin anew, and those that the method has no use for are dropped.
        factor: this rank's share of entries that differ between ranks.

    Raises:
        ConfigError: an entry does not fit, or it is damaged; then nothing has changed.
    """
    store = binding.store
    dropped: dict[str, list[str]] = {}
    states = []
    for i, slot in enumerate(store.slots):
        method, zeros = store.method_for(slot), tf.zeros(slot.shape, slot.dtype)
        fresh, common = store.initial(i)
        state, unused = restored(
            slot.name,
            method,
            zeros,
            found.get(str(i), {}),
            fresh=fresh,
            common=common,
            more={},
            per_rank=store.per_rank(slot),
            factor=factor,
            kinds=(np.ndarray, tf.Tensor),
            place=_placed,
        )
        states.append({**fresh, **common, **state})
        for key in unused:
            dropped.setdefault(key, []).append(slot.name)
    if dropped:
        entries = (f"{key!r} of {len(of)} ({of[0]} ...)" for key, of in dropped.items())
        warnings.warn(
            f"{store.method.name} has no use for {', '.join(entries)} in a state of "
            f"{saved.method['method']}: dropped",
            stacklevel=2,
        )
    store.step.assign(saved.step)
    store.epoch.assign(-1 if saved.epoch is None else saved.epoch)
    for i, state in enumerate(states):
        for key, x in state.items():
            store.states[str(i)][key].assign(x)
    store.consolidated_at.assign(saved.step if saved.consolidated else -1)
    store.forget_undo()


def _placed(x: Any, like: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.reshape(x, like.shape), like.dtype)


def to_bytes(binding: Any) -> bytes:
    """Return :func:`to_arrays` as a file, with a warning if other ranks have something else."""
    if binding.engine.size > 1 and not binding.serves_all():
        warnings.warn(unconsolidated(binding.consolidate_call), stacklevel=3)
    file, named = io.BytesIO(), dict[str, Any](to_arrays(binding))
    np.savez(file, **named)
    return file.getvalue()


def from_bytes(data: bytes) -> dict[str, np.ndarray]:
    """Return the arrays in what :func:`to_bytes` returned."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            return dict(file)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise refused(f"it is no file of arrays ({error})") from error


def state_on_disk(binding: Any) -> Any:
    """Return an object that Keras saves, and which holds the state of the binding."""
    import keras

    class StateOnDisk(keras.layers.Layer):
        """A layer, since Keras lets layers define how they are saved; it computes nothing."""

        def save_own_variables(self, store: Any) -> None:
            store["state"] = np.frombuffer(binding.serialize(), np.uint8)

        def load_own_variables(self, store: Any) -> None:
            names = sorted(store.keys())
            if names:  # else it was saved by a plain optimizer
                if "state" not in names:
                    raise refused(f"its file has {names} in place of 'state'")
                binding.deserialize(np.asarray(store["state"]).tobytes())

    return StateOnDisk(name="compression_on_disk")
