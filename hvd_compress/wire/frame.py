"""The frame: a header of 16 bytes, then the indices, then the values, padded to 8 bytes.

All numbers are little-endian::

    offset  type    field
    0       u8[2]   b"HC"
    2       u8      version, 1
    3       u8      kind, 1 = sparse
    4       u8      dtype of the values: 1 = float32, 2 = float16, 3 = float64
    5       u8      dtype of the indices: 1 = int32, 2 = int64
    6       u16     zero
    8       u32     number of entries
    12      u32     CRC-32 of the bytes behind the header

Indices are ascending.  They are int32 unless the tensor has more than 2**31 elements.  A receiver
checks everything before a byte of it is used as an index.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np

from hvd_compress.errors import PayloadError

_HEADER = struct.Struct("<2sBBBBHII")
_MAGIC, _VERSION, _SPARSE = b"HC", 1, 1
_VALUES = {"float32": 1, "float16": 2, "float64": 3}
_INDICES = {"int32": 1, "int64": 2}


def index_dtype(n: int) -> str:
    """The narrowest index type for a tensor of ``n`` elements."""
    return "int32" if n <= 2**31 else "int64"


def sparse_size(count: int, n: int, values: str) -> int:
    """Bytes of a frame of ``count`` entries of a tensor of ``n`` elements."""
    body = count * (np.dtype(values).itemsize + np.dtype(index_dtype(n)).itemsize)
    return _HEADER.size + body + -body % 8


def encode_sparse(indices: np.ndarray, values: np.ndarray, n: int) -> np.ndarray:
    """A frame (1-D, uint8) of ascending ``indices`` into ``n`` elements and their ``values``
    (float16, float32 or float64)."""
    if indices.size >= 2**32:
        raise PayloadError(f"{indices.size} entries do not fit in one frame; split the tensor")
    dtype = index_dtype(n)
    frame = np.zeros(sparse_size(indices.size, n, values.dtype.name), np.uint8)
    body = frame[_HEADER.size :]
    split = indices.size * np.dtype(dtype).itemsize
    body[:split].view(f"<{np.dtype(dtype).str[1:]}")[:] = indices
    body[split : split + values.nbytes].view(f"<{values.dtype.str[1:]}")[:] = values
    codes = _VALUES[values.dtype.name], _INDICES[dtype]
    header = _HEADER.pack(_MAGIC, _VERSION, _SPARSE, *codes, 0, indices.size, zlib.crc32(body.data))
    frame[: _HEADER.size] = np.frombuffer(header, np.uint8)
    return frame


def decode_sparse(
    frame: np.ndarray, n: int, values: str, count: int, *, sender: str = "a rank"
) -> tuple[np.ndarray, np.ndarray]:
    """``(indices, values)`` of a frame, views into it.

    Args:
        frame: what ``sender`` sent, 1-D uint8.
        n: number of elements of the tensor.
        values: the dtype that the values must have.
        count: the number of entries that there must be.

    Raises:
        PayloadError: the frame is damaged, or made with other options than this rank's.
    """

    def fail(problem: str) -> PayloadError:
        return PayloadError(
            f"bad payload from {sender}: {problem}. Either the message was damaged on its way, or "
            "the ranks do not run the same version with the same compression options, or a "
            "gradient is sparse on some ranks and dense on others (sparse_as_dense=True)"
        )

    if frame.size < _HEADER.size:
        raise fail(f"{frame.size} bytes are less than a header")
    magic, version, kind, value_code, index_code, zero, entries, crc = _HEADER.unpack(
        frame[: _HEADER.size].tobytes()
    )
    if (magic, version, kind, zero) != (_MAGIC, _VERSION, _SPARSE, 0):
        raise fail("no header of a sparse frame, version 1, at its start")
    if value_code != _VALUES[values] or index_code != _INDICES[index_dtype(n)]:
        raise fail(f"values or indices of another dtype than {values} and {index_dtype(n)}")
    if entries != count:
        raise fail(f"{entries} entries where {count} were expected")
    if frame.size != sparse_size(count, n, values):
        raise fail(f"{frame.size} bytes where {sparse_size(count, n, values)} were expected")
    body = frame[_HEADER.size :]
    if zlib.crc32(body.data) != crc:
        raise fail("its checksum does not match")
    dtype = np.dtype(index_dtype(n))
    split = count * dtype.itemsize
    indices = body[:split].view(f"<{dtype.str[1:]}")
    dtype = np.dtype(values)
    decoded = body[split : split + count * dtype.itemsize].view(f"<{dtype.str[1:]}")
    if count and (indices[0] < 0 or indices[-1] >= n or not (indices[1:] > indices[:-1]).all()):
        raise fail(f"indices that are not ascending within 0..{n - 1}")
    return indices, decoded
