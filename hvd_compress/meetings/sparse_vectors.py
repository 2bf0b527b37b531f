"""Sparse vectors in host memory: adding, cutting, choosing.  No communication.

A vector is a ``Sparse`` of ascending int64 indices and values of one dtype, or a dense array once
that is shorter on the wire.  Nothing here makes an array of all n elements unless there are about
that many entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Context, Sparse
from hvd_compress.codecs import top_k
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.kernels import is_compiled, loops
from hvd_compress.wire.frame import DTYPES

Vector = Sparse | np.ndarray


def take_in(sparse: Any, n: Any) -> tuple[Sparse, Any]:
    """Return a user's vector in host memory, checked, and an array of the kind of its results.

    Raises:
        ConfigError: indices that are not ascending within 0..n-1, or not as many as values.
        UnsupportedError: a dtype that frames cannot carry.
    """
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 0:
        raise ConfigError(f"n={n!r}: the number of elements of the flat tensor")
    indices, values = sparse
    at, xp = backend_of(indices), backend_of(values)
    if xp.dtype(values) not in DTYPES:
        raise UnsupportedError(
            f"values of {xp.dtype(values)} cannot travel: make them one of {', '.join(DTYPES)}"
        )
    if "int" not in at.dtype(indices):
        raise ConfigError(f"indices of {at.dtype(indices)}: integers are needed")
    host, here = at.to_numpy(indices), xp.to_numpy(values)
    if host.ndim != 1 or host.shape != here.shape:
        raise ConfigError(
            f"indices of shape {host.shape} and values of shape {here.shape}: pass two flat arrays "
            "of one length"
        )
    if host.size and (host[0] < 0 or host[-1] >= n or not (host[1:] > host[:-1]).all()):
        raise ConfigError(f"indices must be unique and ascending within 0..{n - 1}")
    return Sparse(host.astype(np.int64), here.astype(here.dtype.newbyteorder("="))), values


def give_back(vector: Vector, like: Any) -> Any:
    """Return the same as arrays like ``like``: NumPy's, or torch's on its device."""
    xp = backend_of(like)
    if isinstance(vector, Sparse):
        return Sparse(xp.from_numpy(vector.indices, like), xp.from_numpy(vector.values, like))
    return xp.from_numpy(vector, like)


def empty(dtype: Any) -> Sparse:
    return Sparse(np.empty(0, np.int64), np.empty(0, dtype))


def add_up(
    parts: Sequence[Vector], n: int, dtype: str, is_full: Callable[[int], bool] | None = None
) -> Vector:
    """Return the sum of vectors of ``n`` elements in ``dtype``, added in the order of ``parts``.

    A ``Sparse`` of all places that some part has, until ``is_full(number of places)``; then dense.
    """
    with np.errstate(invalid="ignore", over="ignore"):  # Inf - Inf arrives as NaN, as it should
        sparse = [part for part in parts if isinstance(part, Sparse)]
        entries = sum(part.indices.size for part in sparse)
        if len(sparse) < len(parts):
            return _add_densely(parts, n, dtype)[0]
        if is_full is None or not is_full(entries):
            return _merge(sparse, n, dtype)
        total, has_some = _add_densely(sparse, n, dtype)
        places = np.flatnonzero(has_some)
        return total if is_full(places.size) else Sparse(places, total[places])


def _merge(parts: Sequence[Sparse], n: int, dtype: str) -> Sparse:
    """Add up in the compiled loop; or, of other dtypes, by sorting (index, position) as one
    integer, which is several times faster than argsort."""
    parts = [part for part in parts if part.indices.size]
    if len(parts) < 2:
        return Sparse(parts[0].indices, parts[0].values.astype(dtype)) if parts else empty(dtype)
    if dtype == "float32" and is_compiled():
        every = [part.values.astype(dtype, copy=False) for part in parts]
        return Sparse(*loops().merge([part.indices for part in parts], every, 1))
    count = sum(part.indices.size for part in parts)
    bits = count.bit_length()
    if n.bit_length() + bits > 63:
        raise UnsupportedError(f"{count} entries of {n} elements: split the tensor")
    keys, values = np.empty(count, np.int64), np.empty(count, dtype)
    start = 0
    for part in parts:
        stop = start + part.indices.size
        np.left_shift(part.indices, bits, out=keys[start:stop])
        keys[start:stop] |= np.arange(start, stop)
        values[start:stop] = part.values
        start = stop
    keys.sort()
    values = values[keys & ((1 << bits) - 1)]
    keys >>= bits
    is_first = np.empty(count, bool)
    is_first[0] = True
    np.not_equal(keys[1:], keys[:-1], out=is_first[1:])
    again = np.flatnonzero(~is_first)
    total = values[is_first]
    # One after the other, so that additions keep the order of the parts.
    np.add.at(total, again - np.arange(1, again.size + 1), values[again])
    return Sparse(keys[is_first], total)


def _add_densely(parts: Sequence[Vector], n: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum and a mask of where anything was added, which says nothing for dense parts."""
    total, has_some = np.zeros(n, dtype), np.zeros(n, bool)
    for part in parts:
        if isinstance(part, Sparse):
            total[part.indices] += part.values
            has_some[part.indices] = True
        else:
            total += part
    return total, has_some


def densify(x: Sparse, n: int) -> np.ndarray:
    dense = np.zeros(n, x.values.dtype)
    dense[x.indices] = x.values
    return dense


def join(parts: Sequence[Sparse], bounds: Sequence[int]) -> Sparse:
    """Undo :func:`hvd_compress.requests.sparse.cut`."""
    indices = [part.indices + bounds[i] for i, part in enumerate(parts)]
    return Sparse(np.concatenate(indices), np.concatenate([part.values for part in parts]))


def pick(x: Sparse, which: np.ndarray) -> Sparse:
    """Return the entries that a mask, or ascending positions, selects."""
    return Sparse(x.indices[which], x.values[which])


def contains(x: Sparse, indices: np.ndarray) -> np.ndarray:
    """Return a mask of which of the ascending ``indices`` are among those of ``x``."""
    if not x.indices.size:
        return np.zeros(indices.size, bool)
    at = np.searchsorted(x.indices, indices)
    at[at == x.indices.size] = 0
    return x.indices[at] == indices


def largest(values: np.ndarray, k: int) -> np.ndarray:
    """Return a mask of the ``k`` largest magnitudes, lower positions first among equals; what is
    not finite is larger than all that is."""
    if k >= values.size:
        return np.ones(values.size, bool)
    magnitude = np.where(np.isfinite(values), np.abs(values), np.inf)
    mask = np.zeros(values.size, bool)
    mask[top_k().select(magnitude, k, Context())] = True
    return mask
