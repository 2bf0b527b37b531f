"""bfloat16 in NumPy, which has no such dtype: arrays of its bits, uint16."""

from __future__ import annotations

import numpy as np


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Return the bits (uint16) of the bfloat16 numbers nearest to ``x`` (float32), of two equally
    near ones the even one.  NaN stays NaN."""
    bits = x.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1)))) >> 16
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded.astype(np.uint16))


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """Return the numbers (float32, exact) that the bits (uint16) of bfloat16 stand for: they are
    the upper half of those of float32."""
    return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)
