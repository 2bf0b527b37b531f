"""The frame in which rows of sparse gradients travel."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_compress import PayloadError
from hvd_compress.wire.rows import decode_rows, encode_rows

INDICES = np.array([1, 5, 8], np.int64)
VALUES = np.arange(36, dtype=np.uint8)  # rows of 12 bytes


@given(
    chosen=st.sets(st.integers(0, 10**6)),
    row=st.integers(1, 40),
    seed=st.integers(0, 100),
)
def test_round_trip(chosen, row, seed):
    indices = np.array(sorted(chosen), np.int64)
    values = np.random.default_rng(seed).integers(0, 256, indices.size * row, np.uint8)
    frame = encode_rows(indices, values, 10**6 + 1)
    assert frame.size % 8 == 0
    found, same = decode_rows(frame, 10**6 + 1, row)
    assert found.tolist() == indices.tolist()
    assert same.tobytes() == values.tobytes()


def test_the_bytes_of_a_small_frame():
    """Written out once, so that the format cannot change by accident."""
    frame = encode_rows(np.array([2], np.int64), np.array([1, 2, 3], np.uint8), 10)
    assert frame[:12].tobytes() == b"HC" + bytes.fromhex("03 04 03 00 0a00 01000000")
    assert frame[16:].tobytes() == bytes.fromhex("0200000000000000 010203 0000000000")


@pytest.mark.parametrize(
    ("frame", "n", "row", "problem"),
    [
        (encode_rows(INDICES, VALUES, 10), 11, 12, "no header of 3 rows of a matrix with 11"),
        (encode_rows(INDICES, VALUES, 10), 10, 8, "bytes where"),
        (encode_rows(INDICES, VALUES, 8), 8, 12, "ascending within 0..7"),
        (encode_rows(INDICES[::-1], VALUES, 10), 10, 12, "ascending"),
        (encode_rows(-INDICES[::-1], VALUES, 10), 10, 12, "ascending"),
        (encode_rows(INDICES, VALUES, 10)[:-8], 10, 12, "checksum"),
        (np.zeros(8, np.uint8), 10, 12, "less than a header"),
    ],
    ids=range(7),
)
def test_rows_that_do_not_fit(frame, n, row, problem):
    with pytest.raises(PayloadError, match=problem):
        decode_rows(frame, n, row)


def test_no_rows():
    none = np.zeros(0, np.int64), np.zeros(0, np.uint8)
    frame = encode_rows(*none, 10)
    assert frame.size == 16
    assert [part.size for part in decode_rows(frame, 10, 12)] == [0, 0]
