"""Rounding to bfloat16 in NumPy is that of PyTorch."""

import numpy as np
import torch

from hvd_compress.backends import backend_of
from hvd_compress.backends.bfloat16 import from_bfloat16, to_bfloat16


def patterns():
    """Of float32: all exponents and signs, significands at ties and beside them."""
    high = np.arange(2**16, dtype=np.uint32) << np.uint32(16)
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    return (high[:, None] | low).reshape(-1).view(np.float32)


def test_all_of_float32_is_rounded_as_torch_does():
    x = patterns()
    expected = torch.from_numpy(x.copy()).bfloat16().float().numpy()
    for found in (from_bfloat16(to_bfloat16(x)), backend_of(x).round_to(x, "bfloat16")):
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == np.float32


def test_bits_go_there_and_back():
    bits = np.arange(2**16, dtype=np.uint16)
    numbers = from_bfloat16(bits)
    known = ~np.isnan(numbers)
    np.testing.assert_array_equal(to_bfloat16(numbers)[known], bits[known])


def test_wider_and_narrower_arrays_keep_their_dtype():
    for dtype in (np.float16, np.float64):
        x = np.array([1.00390625, 0.1, np.nan], dtype)
        found = backend_of(x).round_to(x, "bfloat16")
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, np.array([1.0, 0.10009765625, np.nan], dtype))
