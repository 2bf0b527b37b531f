"""The state of a binding as flat arrays, which is what all files hold.

``tf.train.Checkpoint`` and Keras's own files (``.keras``, ``.weights.h5``) write the arrays of
:func:`to_arrays`, and both restore by :func:`load`, which checks them all before it assigns any.

Keras saves an optimizer's attributes that can be saved, each in a place of its own, and looks when
loading only for those that it knows: a plain optimizer finds its own variables, no more and no
less, and does not notice these.
"""

from __future__ import annotations

import io
import json
import math
import warnings
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_compress.integrations.checkpoints import (
    check_array,
    entry,
    refused,
    saver_in,
    share,
    unconsolidated,
    whole,
)

from . import backend

VERSION = 1


def to_arrays(binding: Any) -> dict[str, np.ndarray]:
    """Return all state of a binding as NumPy arrays by flat names."""
    method = json.dumps(binding.method.to_config()).encode()
    arrays = {
        "version": np.int64(VERSION),
        "method": np.frombuffer(method, np.uint8),
        "seed": np.int64(binding.seed),
        "step": binding.step.numpy(),
        "epoch": binding.epoch.numpy(),
        "consolidated": np.int64(binding.is_consolidated),
        "rank": np.int64(binding.engine.rank),
        "size": np.int64(binding.engine.size),
    }
    for name, variable in _variables(binding).items():
        x = variable.numpy()
        # NumPy's files do not know bfloat16.
        arrays[name] = x if x.dtype.kind == "f" else x.astype(np.float32)
    return arrays


def to_save(binding: Any) -> dict[str, np.ndarray]:
    """Return what :func:`to_arrays` does, with a warning if other ranks have something else."""
    if binding.engine.size > 1 and not binding.serves_all():
        warnings.warn(unconsolidated(binding.consolidate_call), stacklevel=3)
    return to_arrays(binding)


def load(binding: Any, arrays: Mapping[str, Any]) -> None:
    """Take up what :func:`to_arrays` returned, on this rank or on another.

    Of entries that differ between ranks, this rank takes its share.  What the arrays lack begins
    anew, and what the method has no use for is dropped.

    Raises:
        ConfigError: it belongs to another model, or it is damaged; then nothing has changed.
    """
    if not isinstance(arrays, Mapping) or not all(isinstance(name, str) for name in arrays):
        raise refused(f"it is {type(arrays).__name__} where a dict of arrays was expected")
    header = {name: _number(x) for name, x in arrays.items() if "." not in name}
    saved = saver_in(header)
    step, epoch = whole(header, "step"), entry(header, "epoch", (int, float))
    if not (math.isfinite(epoch) and epoch >= -1):
        raise refused(f"'epoch' is {epoch} where a number from -1 was expected")
    method = _method_in(header, binding)
    found = {name: x for name, x in arrays.items() if name not in header}
    known = _variables(binding)
    dropped: dict[str, list[str]] = {}
    for name, x in found.items():
        i, key = name.split(".", 1)
        if i not in binding.states:
            raise refused(f"{name!r} fits no variable: it belongs to another model")
        if name not in known:
            dropped.setdefault(key, []).append(binding.slots[int(i)].name)
            continue
        check_array(f"{name!r}", x, backend.size(known[name]))
        check_array(f"{name!r}", x.astype(known[name].dtype.as_numpy_dtype))
    for place in range(len(binding.slots)):
        common = {f"{place}.{key}" for key in binding.initial(place)[1]}
        if 0 < len(missing := sorted(common - found.keys())) < len(common):
            raise refused(f"it has no {missing[0]!r}, but the others of its kind")
    if dropped:
        entries = (f"{key!r} of {len(own)} ({own[0]} ...)" for key, own in dropped.items())
        warnings.warn(
            f"{binding.method.name} has no use for {', '.join(entries)} in a state of {method}: "
            "dropped",
            stacklevel=2,
        )
    factor = share(binding.engine, saved)
    binding.step.assign(step)
    binding.epoch.assign(epoch)
    for place, slot in enumerate(binding.slots):
        own, common = binding.initial(place)
        for key, x in {**own, **common}.items():
            name = f"{place}.{key}"
            if name in found:
                part = factor if key in binding.per_rank(slot) else 1.0
                x = np.reshape(found[name], tuple(known[name].shape)) * part
            known[name].assign(tf.cast(x, known[name].dtype))
    binding.repair()
    binding.consolidated_at.assign(step if saved["consolidated"] else -1)


def _variables(binding: Any) -> dict[str, tf.Variable]:
    return {f"{i}.{key}": v for i, state in binding.states.items() for key, v in state.items()}


def _method_in(header: Mapping[str, Any], binding: Any) -> str:
    """Return the name of the method that a state is of, after a look at what else it says of
    itself.  Files that were written before states had a version say none of it."""
    if "version" not in header:
        return "another method"
    if (version := whole(header, "version")) != VERSION:
        raise refused(f"it has version {version}; known is {VERSION}")
    if (seed := whole(header, "seed", -(2**63))) != binding.seed:
        raise refused(
            f"it is of seed={seed}, and graphs are made with seed={binding.seed} here: pass "
            f"seed={seed} to hvd.DistributedOptimizer, hvd.bind or hvd.DistributedGradientTape"
        )
    try:
        config = json.loads(np.asarray(entry(header, "method", np.ndarray)).tobytes())
    except ValueError:
        raise refused("'method' is no configuration of a method") from None
    return entry(config, "method", str, of="'method'")


def _number(x: Any) -> Any:
    """Return the number in an array of one, and anything else as it is."""
    is_one = isinstance(x, np.ndarray | np.generic) and x.size == 1 and x.dtype.kind in "iuf"
    return x.item() if is_one else x


def to_bytes(arrays: Mapping[str, np.ndarray]) -> bytes:
    file, named = io.BytesIO(), dict[str, Any](arrays)
    np.savez(file, **named)
    return file.getvalue()


def from_bytes(data: bytes) -> dict[str, np.ndarray]:
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
            for name, array in to_save(binding).items():
                store[name] = array

        def load_own_variables(self, store: Any) -> None:
            if not store.keys():
                return  # saved by a plain optimizer
            binding.load_values({name: np.asarray(store[name]) for name in store.keys()})  # noqa: SIM118

    return StateOnDisk(name="compression_on_disk")
