"""Runs of elements that share a scale."""

from __future__ import annotations

import numpy as np

from hvd_compress.config import check_choice, is_whole
from hvd_compress.errors import ConfigError
from hvd_compress.kernels.reference import sums

#: how large a run is, as a number
NORMS = ("l2", "max")


def check_bucket(bucket: int | None) -> None:
    if bucket is not None and (not is_whole(bucket) or bucket < 1):
        raise ConfigError(f"bucket must be a number of elements, or None for all; got {bucket!r}")


def check_norm(norm: str) -> None:
    check_choice("norm", norm, NORMS)


def count(n: int, bucket: int | None) -> int:
    """Return how many buckets ``n`` elements have, of which the last may be shorter."""
    return (1 if n else 0) if bucket is None else -(-n // bucket)


def rows(x: np.ndarray, bucket: int | None) -> list[np.ndarray]:
    """Return views of a flat array with a bucket in each row: those of full length, and, if there
    is one, the shorter one at the end."""
    length = bucket or max(x.size, 1)
    full = x.size // length * length
    parts = [x[:full].reshape(-1, length)]
    return parts if full == x.size else [*parts, x[full:].reshape(1, -1)]


def norms(x: np.ndarray, bucket: int | None, norm: str) -> np.ndarray:
    """Return the norm of every bucket, in the dtype of ``x``; sums are made in float64."""
    found = []
    for part in rows(x, bucket):
        if norm == "max":
            found.append(np.abs(part).max(axis=1, initial=0))
        else:
            found.append(np.sqrt(sums(np.square(part, dtype=np.float64))))
    with np.errstate(over="ignore"):
        return np.concatenate(found).astype(x.dtype)


def per_element(scales: np.ndarray, n: int, bucket: int | None) -> np.ndarray:
    """Return the scale of each of ``n`` elements, or an array of length 1 if they share one."""
    return scales[:1] if bucket is None else np.repeat(scales, bucket)[:n]
