"""Damage to a saved state: a leaf, a branch or an array at a time, the same in every run."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

#: in place of what stood there
_STRANGE = (None, "x", b"", -1, -7.5, 2**70, float("nan"), float("inf"), True, [], {}, [None], ())


def mutations(state: Any, count: int, seed: int = 0) -> Iterator[tuple[str, Any]]:
    """``count`` damaged copies of a nest of dicts, lists and arrays, each with what was done."""
    draw = random.Random(seed)
    for _ in range(count):
        damaged = copy.deepcopy(state)
        places = list(_places(damaged))
        parent, key = draw.choice(places)
        yield f"{key!r}: {_change(parent, key, draw)}", damaged


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    keys = node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    for key in keys:
        yield node, key
        yield from _places(node[key])


def _change(parent: Any, key: Any, draw: random.Random) -> str:
    value = parent[key]
    ways = ["replace"] * 2
    if isinstance(parent, dict):
        ways += ["remove", "rename"]
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        ways += ["spoil", "cut", "stretch", "turn", "scalar", "integers"]
        if hasattr(value, "to_sparse") and value.numel():
            ways += ["sparse", "nowhere"]
    way = draw.choice(ways)
    if way == "remove":
        del parent[key]
    elif way == "rename":
        parent[f"{key}?"] = parent.pop(key)
    elif way == "replace":
        parent[key] = copy.deepcopy(draw.choice(_STRANGE))
        way = f"now {parent[key]!r}"
    else:
        parent[key] = _array(value, way, draw)
    return way


def _array(x: Any, way: str, draw: random.Random) -> Any:
    """An array of the same library."""
    if way == "sparse":
        return x.to_sparse()
    if way == "nowhere":
        return x.to("meta")
    plain = np.array(x.detach().cpu() if hasattr(x, "detach") else x)
    if way == "spoil" and plain.size:
        plain = plain.astype(np.float32)
        plain.reshape(-1)[draw.randrange(plain.size)] = draw.choice([np.nan, np.inf, -np.inf])
    elif way == "cut":
        plain = plain.reshape(-1)[: plain.size // 2]
    elif way == "stretch":
        plain = np.concatenate([plain.reshape(-1), plain.reshape(-1)[:1], [0]])
    elif way == "turn":
        plain = plain.reshape(1, -1)[..., None]
    elif way == "scalar":
        plain = np.array(0.5, np.float32)
    else:
        plain = np.zeros(plain.shape, np.int32)
    if isinstance(x, np.ndarray):
        return plain
    import torch

    return torch.from_numpy(np.ascontiguousarray(plain).reshape(plain.shape))


def same(one: Any, other: Any) -> bool:
    """Equal to the last bit."""
    if hasattr(one, "dtype") and hasattr(other, "dtype"):
        own = (x.detach().cpu().numpy() if hasattr(x, "detach") else x for x in (one, other))
        a, b = map(np.asarray, own)
        return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (one == other or one != one)
