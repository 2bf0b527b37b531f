"""The quantisers behind quantised allreduce, by hand and by their laws, and their frame."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hvd_compress.errors import PayloadError
from hvd_compress.mpi.quantized_frame import (
    DAMAGED,
    FINE,
    NOT_FINITE,
    decode_frame,
    encode_frame,
    frame_size,
)
from hvd_compress.operators import linear_8bit, one_bit

F4 = np.dtype("float32")
BOTH = pytest.mark.parametrize("quantiser", [one_bit, linear_8bit])
vectors = arrays(
    np.float32,
    st.integers(0, 70),
    elements=st.floats(-1e6, 1e6, width=32),
)
lengths = st.integers(1, 80)


def there_and_back(quantiser, x, length):
    levels, codes = quantiser.encode(x, length)
    assert levels.shape == (-(-x.size // length), quantiser.LEVELS)
    assert levels.dtype == x.dtype
    assert codes.dtype == np.uint8
    assert codes.nbytes == quantiser.code_bytes(x.size)
    result = quantiser.decode(levels, codes, x.size, length)
    assert result.dtype == x.dtype
    assert result.shape == x.shape
    return result


def columns(x, length):
    return [x[start : start + length] for start in range(0, x.size, length)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_one_bit_by_hand_with_the_residual_carried_over(dtype):
    residual = np.zeros(4, dtype)
    steps = [
        ([1, -2, 3, -0.5], [2, -1.25, 2, -1.25], [-1, -0.75, 1, 0.75]),
        ([0.5, 0.5, -1, -1], [-1 / 3, -1 / 3, 0, -1 / 3], [-1 / 6, 1 / 12, 0, 1 / 12]),
    ]
    for gradient, sent, left in steps:
        x = np.array(gradient, dtype) + residual
        result = there_and_back(one_bit, x, 4)
        residual = x - result
        np.testing.assert_allclose(result, sent, rtol=1e-6)
        np.testing.assert_allclose(residual, left, rtol=1e-6, atol=1e-7)


def test_one_bit_takes_zeros_for_non_negative():
    levels, codes = one_bit.encode(np.array([0.0, -0.0, 4, -3, 0, 0], np.float32), 4)
    np.testing.assert_array_equal(levels, [[-3, np.float32(4) / 3], [0, 0]])
    assert codes.tolist() == [0b11101100]


def test_sides_without_elements_have_level_zero():
    levels, _ = one_bit.encode(np.array([1, 2, -1, -2], np.float32), 2)
    np.testing.assert_array_equal(levels, [[0, 1.5], [-1.5, 0]])


@given(vectors, lengths)
def test_one_bit_leaves_columns_that_add_up_to_zero(x, length):
    left = (x - there_and_back(one_bit, x, length)).astype(float)
    for rest, column in zip(columns(left, length), columns(x, length), strict=True):
        assert abs(rest.sum()) <= 1e-5 * np.abs(column.astype(float)).sum()


@given(vectors, lengths)
def test_one_bit_has_the_least_error_of_two_values(x, length):
    error = x.astype(float) - there_and_back(one_bit, x, length)
    for rest, column in zip(columns(error, length), columns(x.astype(float), length), strict=True):
        squared = (column**2).sum()
        low, high = column[column < 0], column[column >= 0]
        gained = low.sum() ** 2 / max(low.size, 1) + high.sum() ** 2 / max(high.size, 1)
        assert (rest**2).sum() == pytest.approx(squared - gained, abs=1e-5 * squared)
        # Never worse than signs with one scale, and so a contraction.
        scaled_sign = squared - np.abs(column).sum() ** 2 / column.size
        assert (rest**2).sum() <= scaled_sign + 1e-5 * squared


@given(vectors, lengths)
def test_eight_bits_err_by_half_a_step(x, length):
    error = np.abs(x.astype(float) - there_and_back(linear_8bit, x, length))
    for rest, column in zip(columns(error, length), columns(x, length), strict=True):
        largest = np.abs(column).max(initial=0)
        # Scales below the normal numbers are rounded coarsely; then all of x may remain.
        assert (rest <= 0.5001 * largest / 127 + 127 * 2.0**-149).all()


def test_eight_bits_by_hand():
    levels, codes = linear_8bit.encode(np.array([-254, 1, 3, 254, 5, 0], np.float32), 4)
    np.testing.assert_array_equal(levels, np.array([[2], [5 / 127]], np.float32))
    assert codes.view(np.int8).tolist() == [-127, 0, 2, 127, 127, 0]  # 0.5 and 1.5 to even


@BOTH
def test_no_elements_and_one(quantiser):
    assert there_and_back(quantiser, np.empty(0, np.float32), 5).size == 0
    for value in (0.0, 7.5, -7.5):
        assert there_and_back(quantiser, np.array([value]), 5) == pytest.approx(value)


@BOTH
def test_the_last_column_may_be_shorter(quantiser):
    x = np.random.default_rng(0).standard_normal(23)
    whole = there_and_back(quantiser, x, 10)
    pieces = [there_and_back(quantiser, column, 10) for column in columns(x, 10)]
    np.testing.assert_array_equal(whole, np.concatenate(pieces))


@BOTH
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows_in_its_columns_levels(quantiser, value):
    x = np.ones(9, np.float32)
    x[4] = value
    levels, _ = quantiser.encode(x, 3)
    assert np.isfinite(levels).all(axis=1).tolist() == [True, False, True]


@BOTH
def test_numbers_at_the_edge_are_decoded_finite_or_not_at_all(quantiser):
    limits = np.finfo(np.float32)
    for value in (limits.max, limits.max / 2, limits.tiny, limits.smallest_subnormal):
        for length in (1, 4):
            levels, codes = quantiser.encode(np.full(4, value, np.float32), length)
            if np.isfinite(levels).all():
                assert np.isfinite(quantiser.decode(levels, codes, 4, length)).all()
            else:
                assert value > limits.max / 3


@pytest.mark.parametrize("bits", [1, 8])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_frames_carry_what_quantisers_make(bits, dtype):
    x = np.random.default_rng(0).standard_normal(50).astype(dtype)
    frame, status = encode_frame(x, 8, bits)
    assert status == FINE
    assert frame.size == frame_size(50, 8, bits, x.dtype)
    values, status = decode_frame(frame, 50, 8, bits, x.dtype)
    assert status == FINE
    np.testing.assert_array_equal(values, there_and_back({1: one_bit, 8: linear_8bit}[bits], x, 8))


def test_a_column_of_2048_float32_takes_2112_bits():
    two, one = (frame_size(n * 2048, 2048, 1, F4) for n in (2, 1))
    assert 8 * (two - one) == 2112
    assert round(32 * 2048 / 2112, 2) == 31.03
    assert frame_size(0, 2048, 1, F4) == 16


def test_frames_say_what_is_wrong():
    frame, status = encode_frame(np.array([1, np.nan], np.float32), 2, 1)
    assert status == NOT_FINITE
    assert decode_frame(frame, 2, 2, 1, F4) == (None, NOT_FINITE)
    frame, status = encode_frame(np.ones(2, np.float32), 2, 1, DAMAGED)
    assert status == DAMAGED
    assert decode_frame(frame, 2, 2, 1, F4) == (None, DAMAGED)


def test_every_damaged_byte_is_noticed():
    frame, _ = encode_frame(np.arange(10, dtype=np.float32), 4, 1)
    for place in range(frame.size):
        for bit in range(8):
            bad = frame.copy()
            bad[place] ^= 1 << bit
            with pytest.raises(PayloadError, match=r"rank 3.*checksum"):
                decode_frame(bad, 10, 4, 1, F4, sender="rank 3")


def test_frames_of_other_options_are_refused():
    frame, _ = encode_frame(np.ones(16, np.float32), 8, 1)
    with pytest.raises(PayloadError, match="bytes where"):
        decode_frame(frame, 17, 8, 1, F4)
    with pytest.raises(PayloadError, match="bytes where"):
        decode_frame(frame[:5], 16, 8, 1, F4)
    # The same size, by other numbers: 3 columns of 1 bit and 8 bytes, 3 of 8 bits and 4 bytes.
    frame, _ = encode_frame(np.ones(104, np.float32), 40, 1)
    assert frame.size == frame_size(25, 10, 8, F4)
    with pytest.raises(PayloadError, match="8 bits, float32 and 3 columns"):
        decode_frame(frame, 25, 10, 8, F4)
