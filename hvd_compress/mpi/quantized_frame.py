"""What one rank sends another in a quantised allreduce: a header of 16 bytes, the levels of each
column, the codes.

All numbers are little-endian::

    offset  type    field
    0       u8[2]   b"HQ"
    2       u8      version, 1
    3       u8      bits an element, 1 or 8
    4       u8      dtype of the levels: 1 = float32, 3 = float64
    5       u8      status: 0 = fine, 1 = not finite, 2 = what came to the sender was damaged
    6       u16     zero
    8       u32     number of columns
    12      u32     CRC-32 of the first 12 bytes and of everything behind the header

Its size follows from the numbers of elements and columns, so that a receiver knows it beforehand,
whatever the status; unless that is 0, levels and codes mean nothing.
"""

from __future__ import annotations

import struct
import zlib
from types import ModuleType

import numpy as np

from hvd_compress.errors import PayloadError
from hvd_compress.operators import linear_8bit, one_bit

_HEADER = struct.Struct("<2sBBBBHI")
_CHECKSUM = struct.Struct("<I")
_BEFORE = _HEADER.size + _CHECKSUM.size
_MAGIC, _VERSION = b"HQ", 1
_DTYPES = {"float32": 1, "float64": 3}

FINE, NOT_FINITE, DAMAGED = range(3)
QUANTISERS: dict[int, ModuleType] = {1: one_bit, 8: linear_8bit}


def frame_size(n: int, length: int, bits: int, dtype: np.dtype) -> int:
    """Bytes of a frame for ``n`` elements in columns of ``length``."""
    quantiser = QUANTISERS[bits]
    levels = -(-n // length) * quantiser.LEVELS * dtype.itemsize
    return _BEFORE + levels + quantiser.code_bytes(n)


def encode_frame(
    x: np.ndarray, length: int, bits: int, status: int = FINE
) -> tuple[np.ndarray, int]:
    """``(frame, status)``: the flat ``x`` (float32 or float64) as a frame (1-D, uint8).

    The status becomes ``NOT_FINITE`` if ``x`` has NaN or Inf and it was ``FINE`` before.
    """
    quantiser, dtype = QUANTISERS[bits], x.dtype
    frame = np.zeros(frame_size(x.size, length, bits, dtype), np.uint8)
    columns = -(-x.size // length)
    if status == FINE:
        levels, codes = quantiser.encode(x, length)
        if np.isfinite(levels).all():
            split = _BEFORE + levels.nbytes
            frame[_BEFORE:split].view(dtype.newbyteorder("<"))[:] = levels.reshape(-1)
            frame[split:] = codes
        else:
            status = NOT_FINITE
    header = _HEADER.pack(_MAGIC, _VERSION, bits, _DTYPES[dtype.name], status, 0, columns)
    crc = zlib.crc32(frame[_BEFORE:].data, zlib.crc32(header))
    frame[:_BEFORE] = np.frombuffer(header + _CHECKSUM.pack(crc), np.uint8)
    return frame, status


def decode_frame(
    frame: np.ndarray,
    n: int,
    length: int,
    bits: int,
    dtype: np.dtype,
    *,
    sender: str = "a rank",
) -> tuple[np.ndarray | None, int]:
    """``(values, status)``; the values are a new flat array of ``n`` elements of ``dtype``
    (float32 or float64), or ``None`` unless the status is ``FINE``.

    Raises:
        PayloadError: the frame is damaged, or made with other options than this rank's.
    """

    def fail(problem: str) -> PayloadError:
        return PayloadError(
            f"bad payload from {sender}: {problem}. Either the message was damaged on its way, or "
            "the ranks do not run the same version with the same options"
        )

    size, columns = frame_size(n, length, bits, dtype), -(-n // length)
    if frame.size != size:
        raise fail(f"{frame.size} bytes where {size} were expected")
    header = frame[: _HEADER.size].tobytes()
    (crc,) = _CHECKSUM.unpack(frame[_HEADER.size : _BEFORE].tobytes())
    if zlib.crc32(frame[_BEFORE:].data, zlib.crc32(header)) != crc:
        raise fail("its checksum does not match")
    status = header[5]
    expected = _HEADER.pack(_MAGIC, _VERSION, bits, _DTYPES[dtype.name], status, 0, columns)
    if header != expected or status > DAMAGED:
        raise fail(
            f"no header of a quantised frame, version 1, with {bits} bits, {dtype} and {columns} "
            "columns at its start"
        )
    if status != FINE:
        return None, status
    quantiser = QUANTISERS[bits]
    split = _BEFORE + columns * quantiser.LEVELS * dtype.itemsize
    levels = frame[_BEFORE:split].view(dtype.newbyteorder("<")).astype(dtype, copy=False)
    return quantiser.decode(
        levels.reshape(columns, quantiser.LEVELS), frame[split:], n, length
    ), status
