"""Damage to frames of every kind: an error that says so, and no memory by a number in them."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest

from benchmarks.reliability.frames import every
from hvd_compress.errors import PayloadError
from tests.frames import sealed

KINDS = ("coded", "dense", "rows", "server", "sparse")
FRAMES = [f for f in every(0) if f.name.startswith(KINDS)]


@pytest.mark.parametrize("case", FRAMES, ids=lambda frame: frame.name)
def test_no_bit_of_a_frame_may_flip(case):
    """Nor does a number of values that is wrong, behind a checksum that is right, size memory."""
    frame, read = case.frame, case.read
    read(frame)
    counts = [struct.pack("<I", n) for n in (2**16, 2**30, 2**32 - 1)]
    tracemalloc.start()
    try:
        for bit in range(8 * frame.size):
            damaged = frame.copy()
            damaged[bit // 8] ^= 1 << bit % 8
            with pytest.raises(PayloadError):
                read(damaged)
        for count in counts:
            larger = frame.copy()
            larger[8:12] = np.frombuffer(count, np.uint8)
            with pytest.raises(PayloadError):
                read(sealed(larger))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 200_000
