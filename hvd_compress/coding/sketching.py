"""A count sketch: a small table from which the large elements of a vector can be estimated.

In each row j of the table every element i has a cell h_j(i) and a sign s_j(i), drawn at random::

    S[j, h_j(i)] += s_j(i) x_i          for all i
    estimate of x_i = median over j of  s_j(i) S[j, h_j(i)]

The table is linear in x, so tables add up.  With c columns a row's estimate is off by about
|x| / sqrt(c); the more rows, the more rarely is their median off by much more than that (Charikar,
Chen, Farach-Colton, 2002).

Cells and signs are functions of i and of two random numbers each, ``(a i + b) mod 2^64`` cut to
its highest 32 bits: pairwise independent for up to 2^32 elements (Dietzfelbinger, 1996), and never
stored.
"""

from __future__ import annotations

import dataclasses

import numpy as np

_HALF = np.uint64(32)


@dataclasses.dataclass(frozen=True)
class Hashes:
    """Cells and signs of ``n`` elements in a table of ``shape``, rows and columns."""

    n: int
    shape: tuple[int, int]
    #: a and b of cells and of signs, shape (rows, 4), uint64
    numbers: np.ndarray

    @classmethod
    def draw(cls, n: int, shape: tuple[int, int], random: np.random.Generator) -> Hashes:
        return cls(n, shape, random.integers(0, 2**64, (shape[0], 4), np.uint64))

    def row(self, j: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the cell (int64) and the sign (-1.0 or 1.0) of every element in row ``j``."""
        i = np.arange(self.n, dtype=np.uint64)
        a, b, c, d = self.numbers[j]
        cells = (a * i + b) >> _HALF
        cells *= np.uint64(self.shape[1])
        cells >>= _HALF
        signs = ((c * i + d) >> np.uint64(63)).astype(np.float64)
        signs *= 2
        signs -= 1
        return cells.astype(np.int64), signs


def sketch(x: np.ndarray, hashes: Hashes) -> np.ndarray:
    """Return the table of the flat ``x``, in its dtype; sums are made in float64."""
    table = np.empty(hashes.shape, x.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        for j in range(hashes.shape[0]):
            cells, signs = hashes.row(j)
            table[j] = np.bincount(cells, signs * x, hashes.shape[1])
    return table


def estimates(table: np.ndarray, hashes: Hashes) -> np.ndarray:
    """Return the estimate of every element (float64, shape (n,)).  The number of rows is odd."""
    rows = hashes.shape[0]
    found = np.empty((rows, hashes.n))
    for j in range(rows):
        cells, signs = hashes.row(j)
        np.multiply(table[j][cells], signs, out=found[j])
    found.partition(rows // 2, axis=0)
    return found[rows // 2]
