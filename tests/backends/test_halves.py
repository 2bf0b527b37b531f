"""Half precisions in NumPy, compiled and not, are those of PyTorch."""

import numpy as np
import pytest
import torch

from hvd_compress import kernels
from hvd_compress.backends import backend_of, halves

TORCH = {"float16": torch.float16, "bfloat16": torch.bfloat16}
BITS = np.arange(2**16, dtype=np.uint16)


@pytest.fixture(params=["NumPy", "baseline", "best"])
def loops(request, monkeypatch):
    if request.param == "NumPy":
        monkeypatch.setattr(halves, "_compiled", lambda x, out: None)
        yield
    elif kernels.native is None:
        pytest.skip("no compiled loops here: halves were tested in NumPy only")
    else:
        kernels.native.halves.use_instructions(0 if request.param == "baseline" else -1)
        yield
        kernels.native.halves.use_instructions(-1)


def patterns():
    """Values of float32: all exponents and signs, significands at ties of both formats and beside
    them."""
    high = np.arange(2**16, dtype=np.uint32) << np.uint32(16)
    low = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xEFFF, 0xF000, 0xFFFF]
    return (high[:, None] | np.array(low, np.uint32)).reshape(-1).view(np.float32)


def like(bits, name):
    return bits if name == "bfloat16" else bits.view(np.float16)


@pytest.mark.parametrize("name", TORCH)
def test_all_of_float32_is_rounded_as_torch_does(loops, name):
    x = patterns()
    expected = torch.from_numpy(x.copy()).to(TORCH[name])
    found = like(np.empty(x.size, np.uint16), name)
    halves.narrow(x, found)
    known = ~np.isnan(x)
    np.testing.assert_array_equal(
        found.view(np.uint16)[known], expected.view(torch.uint16).numpy()[known]
    )
    wide = np.empty_like(x)
    halves.widen(found, wide)
    np.testing.assert_array_equal(wide, expected.float().numpy())
    np.testing.assert_array_equal(backend_of(x).round_to(x, name), expected.float().numpy())


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 100, 2**16])
def test_bits_go_there_and_back(loops, name, n):
    bits = BITS[-n:] if n else BITS[:0]
    numbers = np.full(n, 7, np.float32)
    halves.widen(like(bits, name), numbers)
    back = like(np.zeros(n, np.uint16), name)
    halves.narrow(numbers, back)
    known = ~np.isnan(numbers)
    np.testing.assert_array_equal(back.view(np.uint16)[known], bits[known])
    total = np.full(n, 0.1, np.float32)
    halves.widen(like(bits, name), total, add=True)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(total, np.float32(0.1) + numbers)


def test_views_that_the_loops_do_not_take(loops):
    x = np.arange(40, dtype=np.float32).reshape(4, 10)
    found = np.empty((4, 5), np.float16)
    halves.narrow(x[:, ::2], found)
    out = np.zeros((4, 10), np.float32)
    halves.widen(found, out[:, ::2])
    np.testing.assert_array_equal(out[:, ::2], x[:, ::2])
    assert not out[:, 1::2].any()


def test_wider_and_narrower_arrays_keep_their_dtype(loops):
    for dtype in (np.float16, np.float64):
        x = np.array([1.00390625, 0.1, np.nan], dtype)
        found = backend_of(x).round_to(x, "bfloat16")
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, np.array([1.0, 0.10009765625, np.nan], dtype))
