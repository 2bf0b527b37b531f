"""The frame of coded values: see docs/wire-format.md#coded-values.

If values are not finite, or there are none, the codes are zeros: a frame's size does not depend on
it.
"""

from __future__ import annotations

import zlib

import numpy as np

from hvd_compress.codecs.base import Codec
from hvd_compress.wire.frame import (
    VALUES,
    best_parameter,
    gaps_of,
    index_dtype,
    pack,
    plain_indices,
    unpack,
)
from hvd_compress.wire.header import START, Header, Kind, failing, opened, padded

_CAUSES = "the ranks do not run the same version with the same compression options"
_NOT_FINITE, _PACKED = 1, 2


def coded_size(
    codec: Codec, count: int, dtype: np.dtype, n: int | None = None, row: int = 1
) -> int:
    """Return the bytes of a frame of ``count`` values.

    Args:
        n: number of elements that indices are into, which are not packed; there is one for every
            ``row`` values.
    """
    indices = 0 if n is None else count // row * np.dtype(index_dtype(n)).itemsize
    return padded(indices + codec.size(count, dtype))


def encode_coded(
    codec: Codec,
    x: np.ndarray,
    random: np.random.Generator,
    indices: np.ndarray | None = None,
    n: int | None = None,
    *,
    packed: bool = False,
    row: int = 1,
    sent: np.ndarray | None = None,
) -> np.ndarray:
    """Return a frame (1-D, uint8) of the flat ``x`` (float32 or float64).

    Args:
        indices, n: the places of the values among n elements, or n rows of ``row`` values; by
            default there are none.
        packed: pack indices if that is shorter.
        sent: the values that are read from the frame are written here, if it is given.
    """
    count, dtype = x.size, x.dtype
    size, status = coded_size(codec, count, dtype, n, row), 0
    own = np.zeros(0, np.uint8)
    if indices is not None and n is not None:
        own = indices.astype(f"<{np.dtype(index_dtype(n)).str[1:]}").view(np.uint8)
        if packed and (short := _packed(indices, n)) is not None:
            shorter = padded(short.size + codec.size(count, dtype))
            if shorter < size:
                own, size, status = short, shorter, _PACKED
    frame = np.zeros(size, np.uint8)
    start = START + own.size
    frame[START:start] = own
    if not codec.put(x, random, frame[start : start + codec.size(count, dtype)], sent):
        status |= _NOT_FINITE
        if sent is not None:
            sent[:] = np.nan
    return _header(codec, count, dtype, status).seal(frame)


def encode_sent(
    codec: Codec,
    x: np.ndarray,
    random: np.random.Generator,
    indices: np.ndarray | None = None,
    n: int | None = None,
    *,
    packed: bool = False,
    row: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the frame of :func:`encode_coded`, and the values that are read from it."""
    sent = np.zeros(x.size, x.dtype.name)
    return encode_coded(codec, x, random, indices, n, packed=packed, row=row, sent=sent), sent


def decode_coded(
    codec: Codec,
    frame: np.ndarray,
    count: int | None,
    dtype: np.dtype,
    n: int | None = None,
    *,
    row: int = 1,
    sender: str = "a rank",
    out: np.ndarray | None = None,
    add: bool = False,
) -> tuple[np.ndarray | None, np.ndarray]:
    """``(indices, values)``; indices are ``None`` unless ``n`` is given, and all values are NaN if
    one of the sender's was not finite.  ``count`` is ``None`` if only the sender knows it; ``row``
    values have one index.  Values are written to ``out`` (1-D, contiguous, of ``dtype``) if that is
    given, or with ``add`` added.
    """

    fail = failing(sender, _CAUSES)
    header = opened(frame, Kind.CODED, fail=fail)  # before it says how large anything is
    if count is None:
        count = header.number
    size, codes = coded_size(codec, count, dtype, n, row), codec.size(count, dtype)
    status = header.second
    # Packed indices fill what codes and padding leave, which a frame of plain ones never reaches.
    room = frame.size - START - codes
    room -= room % 8
    if status & _PACKED:
        if n is None or frame.size % 8 or room < 8 or frame.size >= size:
            raise fail(f"{frame.size} bytes are no {count} values with packed indices")
    elif frame.size != size:
        raise fail(f"{frame.size} bytes where {size} were expected")
    if header != _header(codec, count, dtype, status) or status > (_NOT_FINITE | _PACKED):
        raise fail(f"no header of {count} values by {codec!r} at its start")
    start, indices = START, None
    if count % row:
        raise fail(f"{count} values are no rows of {row}")
    try:
        if n is not None:
            packed = status & _PACKED
            start += room if packed else count // row * np.dtype(index_dtype(n)).itemsize
            code = frame[START:start]
            indices = unpack(code, count // row, n) if packed else plain_indices(code, n)
            indices = indices.astype(index_dtype(n), copy=False)
        values = np.zeros(count, dtype) if out is None else out
        if status & _NOT_FINITE:
            values[:] = np.nan
        else:
            codec.decode_to(frame[start : start + codes], values, add)
        return indices, values
    except ValueError as error:
        raise fail(str(error)) from None


def _packed(indices: np.ndarray, n: int) -> np.ndarray | None:
    """The packed indices, padded to 8 bytes, if they can be."""
    gaps = gaps_of(indices, index_dtype(n))
    found = best_parameter(gaps, n)
    if found is None:
        return None
    b, size = found
    code = np.zeros(size + -size % 8, np.uint8)
    pack(gaps, b, code)
    return code


def _header(codec: Codec, count: int, dtype: np.dtype, status: int) -> Header:
    tag = zlib.crc32(repr(codec).encode()) & 0xFFFF
    return Header(Kind.CODED, VALUES[dtype.name], status, tag, count)
