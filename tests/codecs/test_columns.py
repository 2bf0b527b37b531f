"""The codecs with columns, by hand and by their laws, and in frames."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hvd_compress.codecs import column_means, linear
from hvd_compress.codecs.frame import (
    decode_coded,
    encode_coded,
)
from hvd_compress.errors import PayloadError
from tests.frames import sealed

F4 = np.dtype("float32")
BOTH = pytest.mark.parametrize("codec", [column_means, linear])
#: neither codec draws
NO_RANDOM = np.random.default_rng(0)
vectors = arrays(
    np.float32,
    st.integers(0, 70),
    elements=st.floats(-1e6, 1e6, width=32),
)
lengths = st.integers(1, 80)


def encode(codec, x):
    """Levels, shape (columns, levels of each), and the bytes of the codes."""
    code = codec.encode(x, NO_RANDOM)
    assert code.dtype == np.uint8
    assert code.size == codec.size(x.size, x.dtype)
    columns = -(-x.size // codec.column)
    levels = 2 if isinstance(codec, column_means) else 1
    split = columns * levels * x.itemsize
    return code[:split].view(x.dtype).reshape(columns, levels), code[split:]


def there_and_back(codec, x):
    result = codec.decode(codec.encode(x, NO_RANDOM), x.size, x.dtype)
    assert result.dtype == x.dtype
    assert result.shape == x.shape
    return result


def columns(x, length):
    return [x[start : start + length] for start in range(0, x.size, length)]


def test_one_bit_takes_zeros_for_non_negative():
    levels, codes = encode(column_means(4), np.array([0.0, -0.0, 4, -3, 0, 0], np.float32))
    np.testing.assert_array_equal(levels, [[-3, np.float32(4) / 3], [0, 0]])
    assert codes.tolist() == [0b11101100]


def test_sides_without_elements_have_level_zero():
    levels, _ = encode(column_means(2), np.array([1, 2, -1, -2], np.float32))
    np.testing.assert_array_equal(levels, [[0, 1.5], [-1.5, 0]])


@given(vectors, lengths)
def test_one_bit_leaves_columns_that_add_up_to_zero(x, length):
    left = (x - there_and_back(column_means(length), x)).astype(float)
    for rest, column in zip(columns(left, length), columns(x, length), strict=True):
        # Means are rounded, the smallest of all to multiples of 2^-149.
        rounding = column.size * 2.0**-149
        assert abs(rest.sum()) <= 1e-5 * np.abs(column.astype(float)).sum() + rounding


@given(vectors, lengths)
def test_one_bit_has_the_least_error_of_two_values(x, length):
    error = x.astype(float) - there_and_back(column_means(length), x)
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
    error = np.abs(x.astype(float) - there_and_back(linear(8, length), x))
    for rest, column in zip(columns(error, length), columns(x, length), strict=True):
        largest = np.abs(column).max(initial=0)
        # Scales below the normal numbers are rounded coarsely; then all of x may remain.
        assert (rest <= 0.5001 * largest / 127 + 127 * 2.0**-149).all()


def test_eight_bits_by_hand():
    levels, codes = encode(linear(8, 4), np.array([-254, 1, 3, 254, 5, 0], np.float32))
    np.testing.assert_array_equal(levels, np.array([[2], [5 / 127]], np.float32))
    assert (codes.astype(int) - 127).tolist() == [-127, 0, 2, 127, 127, 0]  # 0.5 and 1.5 to even


@BOTH
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows_in_its_columns_levels(codec, value):
    x = np.ones(9, np.float32)
    x[4] = value
    levels, _ = encode(codec(column=3), x)
    assert np.isfinite(levels).all(axis=1).tolist() == [True, False, True]


@BOTH
def test_numbers_at_the_edge_are_decoded_finite_or_not_at_all(codec):
    limits = np.finfo(np.float32)
    for value in (limits.max, limits.max / 2, limits.tiny, limits.smallest_subnormal):
        for length in (1, 4):
            own, x = codec(column=length), np.full(4, value, np.float32)
            if np.isfinite(encode(own, x)[0]).all():
                assert np.isfinite(there_and_back(own, x)).all()
            else:
                assert not np.isfinite(there_and_back(own, x)).any()
                assert value > limits.max / 3


@BOTH
def test_columns_by_shape(codec):
    for shape in ((2, 10, 10), (80,), (2048, 1), (9000,), ()):
        assert codec().for_shape(shape).column == column_means().for_shape(shape).column
    assert codec(column=7).for_shape((2, 10, 10)) == codec(column=7)
    assert codec(column=7).unit(100) == 7
    assert codec().unit(100) == 100


@BOTH
def test_a_status_that_there_is_not(codec):
    frame = encode_coded(codec(column=4), np.ones(10, F4), np.random.default_rng(0))
    frame[5] += 4
    with pytest.raises(PayloadError, match="header"):
        decode_coded(codec(column=4), sealed(frame), 10, F4)
