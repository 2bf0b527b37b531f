"""The checksum of messages is that of zlib."""

from __future__ import annotations

import zlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hvd_compress import kernels


@given(st.binary(max_size=600), st.integers(0, 15), st.integers(0, 2**32 - 1))
def test_of_any_bytes_behind_any_others(data, skipped, start):
    x = np.frombuffer(data, np.uint8)[skipped:]
    assert kernels.crc32(x, start) == zlib.crc32(x.tobytes(), start)


def test_of_every_length_and_of_a_long_array():
    x = np.random.default_rng(0).integers(0, 256, 1_000_003, np.uint8)
    for n in (*range(300), x.size):
        assert kernels.crc32(x[:n]) == zlib.crc32(x[:n].tobytes())


def test_without_a_compiler(monkeypatch):
    monkeypatch.setattr(kernels, "native", None)
    assert kernels.crc32(np.frombuffer(b"123456789", np.uint8)) == 0xCBF43926
