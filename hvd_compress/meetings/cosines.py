"""The discrete cosine transform (DCT-II, orthonormal) of a tensor in chunks, by products with a
matrix of cosines, which every framework has."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array


@functools.cache
def dct_matrix(n: int) -> np.ndarray:
    """Return C, shape (n, n), float64: ``C @ x`` are the coefficients of n numbers, and
    ``C.T @ (C @ x)`` is x."""
    frequency, place = np.arange(n)[:, None], np.arange(n)
    cosines = np.sqrt(2 / n) * np.cos(np.pi / n * (place + 0.5) * frequency)
    cosines[0] = np.sqrt(1 / n)
    return cosines


class Chunks(NamedTuple):
    """A tensor as a matrix of ``rows`` x ``columns``, cut into chunks of ``height`` x ``width``."""

    rows: int
    columns: int
    height: int
    width: int

    @property
    def size(self) -> int:
        """The number of elements of a chunk."""
        return self.height * self.width

    @property
    def number(self) -> int:
        """The number of chunks."""
        return self.rows * self.columns // self.size


def chunks_of(shape: tuple[int, ...], side: int) -> Chunks:
    """Return the chunks of a tensor: no longer than ``side``, each side the largest divisor of its
    dimension.  Of the ways to make a matrix of neighbouring dimensions the one with the largest
    chunks is taken, and of those the first; a vector is a matrix of one row."""
    cuts = range(1, len(shape)) if len(shape) > 1 else (0,)
    matrices = [(math.prod(shape[:cut]), math.prod(shape[cut:])) for cut in cuts]
    found = [Chunks(n, m, _divisor(n, side), _divisor(m, side)) for n, m in matrices]
    return max(found, key=lambda chunks: chunks.size)


def _divisor(n: int, most: int) -> int:
    return next((d for d in range(min(n, most), 0, -1) if n % d == 0), 1)


def transform(x: Array, chunks: Chunks) -> Array:
    """Return the coefficients of a flat array, one row a chunk, in the dtype of ``x``.  Of a chunk
    they stand column by column."""
    xp, (n, m, height, width) = backend_of(x), chunks
    # Products of matrices depend in their last bits on where in memory these begin.
    x = xp.reshape(xp.copy(x), (-1, width))
    x = xp.transpose(xp.reshape(_product(x, dct_matrix(width).T), (n // height, height, m)))
    x = _product(xp.reshape(x, (-1, height)), dct_matrix(height).T)
    return xp.reshape(x, (chunks.number, chunks.size))


def inverse(coefficients: Array, chunks: Chunks) -> Array:
    """Undo :func:`transform`, from flat coefficients to a flat array."""
    xp, (n, m, height, width) = backend_of(coefficients), chunks
    x = _product(xp.reshape(coefficients, (-1, height)), dct_matrix(height))
    x = xp.transpose(xp.reshape(x, (n // height, m, height)))
    return xp.reshape(_product(xp.reshape(x, (-1, width)), dct_matrix(width)), (n * m,))


def _product(x: Array, matrix: np.ndarray) -> Array:
    if matrix.size == 1:  # the transform of one number is that number
        return x
    xp = backend_of(x)
    return xp.matmul(x, xp.from_numpy(np.ascontiguousarray(matrix, xp.dtype(x)), x))
