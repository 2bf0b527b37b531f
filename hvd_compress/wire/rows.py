"""The frame of some rows of a matrix, in any dtype: see docs/wire-format.md#rows."""

from __future__ import annotations

import numpy as np

from hvd_compress.wire.header import START, Header, Kind, failing, length_tag, opened, padded

_CAUSES = (
    "the ranks' models differ, or a gradient is sparse on some ranks and dense on others "
    "(sparse_as_dense=True)"
)


def encode_rows(indices: np.ndarray, values: np.ndarray, n: int) -> np.ndarray:
    """A frame (1-D, uint8) of the rows at ascending ``indices`` (int64) of ``n``; ``values`` are
    their bytes (uint8), one row after the other."""
    frame = np.zeros(padded(indices.nbytes + values.nbytes), np.uint8)
    start = START + indices.nbytes
    frame[START:start].view("<i8")[:] = indices
    frame[start : start + values.nbytes] = values
    row = values.nbytes // max(indices.size, 1)
    return _header(indices.size, row, n).seal(frame)


def decode_rows(
    frame: np.ndarray, n: int, row: int, *, sender: str = "a rank"
) -> tuple[np.ndarray, np.ndarray]:
    """Return ``(indices, values)`` as they were encoded, views into the frame.

    Args:
        n: rows of the matrix.
        row: bytes of a row.
    """

    fail = failing(sender, _CAUSES, "rows")
    header = opened(frame, Kind.ROWS, fail=fail)
    count = header.number
    if frame.size != padded(count * (8 + row)):
        raise fail(f"{frame.size} bytes where {padded(count * (8 + row))} were expected")
    if header != _header(count, row if count else 0, n):
        raise fail(f"no header of {count} rows of a matrix with {n} rows of {row} bytes")
    start = START + 8 * count
    indices = frame[START:start].view("<i8")
    if count and (indices[0] < 0 or indices[-1] >= n or not (indices[1:] > indices[:-1]).all()):
        raise fail(f"indices that are not ascending within 0..{n - 1}")
    return indices, frame[start : start + count * row]


def _header(count: int, row: int, n: int) -> Header:
    return Header(Kind.ROWS, row % 256, 0, length_tag(n), count)
