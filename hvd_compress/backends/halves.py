"""Half precisions in NumPy: float16, and bfloat16, which it lacks: arrays of its bits, uint16."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np


def narrow(x: np.ndarray, out: np.ndarray, threads: int | None = None) -> None:
    """Write to ``out`` (float16, or uint16 for the bits of bfloat16) the numbers nearest to ``x``
    (float32), of two equally near ones the even one.  NaN stays NaN, of any bits.

    ``threads`` is their number at most, ``None`` for the usual one.  With messages under way none
    is best, since the last one to get a processor is waited for.
    """
    if (native := _compiled(x, out)) is not None:
        native.narrow(
            x, out.dtype == np.uint16, out.view(np.uint16), threads or _kernels().threads()
        )
    elif out.dtype == np.uint16:
        bits = x.view(np.uint32)
        rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1)))) >> 16
        out[:] = np.where(np.isnan(x), np.uint16(0x7FC0), rounded.astype(np.uint16))
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            out[:] = x


def widen(x: np.ndarray, out: np.ndarray, add: bool = False, threads: int | None = None) -> None:
    """Write to ``out`` (float32) the numbers that ``x`` holds, float16 or the bits of bfloat16; or
    add them.  ``threads`` as for :func:`narrow`."""
    if (native := _compiled(x, out)) is not None:
        native.widen(
            x.view(np.uint16), x.dtype == np.uint16, out, add, threads or _kernels().threads()
        )
        return
    if x.dtype == np.uint16:  # the upper half of float32
        x = np.left_shift(x, 16, dtype=np.uint32).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(out, x, out=out) if add else np.copyto(out, x)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Return the bits (uint16) of bfloat16 numbers: see :func:`narrow`."""
    out = np.empty(x.shape, np.uint16)
    narrow(x, out)
    return out


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """Return the numbers (float32) that bits of bfloat16 stand for."""
    out = np.empty(bits.shape, np.float32)
    widen(bits, out)
    return out


def _compiled(x: np.ndarray, out: np.ndarray) -> Any:
    """The compiled loops, if there are any and the arrays are as they want them."""
    native, own, theirs = _kernels().native, x.flags, out.flags
    fits = own.c_contiguous and own.aligned and theirs.c_contiguous and theirs.aligned
    return native.halves if fits and native is not None else None


def _kernels() -> Any:
    """The loops, found by the name that NumPy's backend has for them: they are written over
    backends."""
    return importlib.import_module("hvd_compress.kernels")
