"""Codecs: by hand, by their classes of operators, and their frame."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hvd_compress import codecs, from_config
from hvd_compress.blocks import (
    alltoall,
    chain,
    column_means,
    contraction,
    exponential_dithering,
    float8,
    linear,
    logarithmic,
    natural,
    natural_dithering,
    scaled_sign,
    sign,
    ternary,
    uniform_dithering,
)
from hvd_compress.codecs.frame import coded_size, decode_coded, encode_coded
from hvd_compress.engines.lockstep import World
from hvd_compress.errors import ConfigError, PayloadError, UnsupportedError
from hvd_compress.kernels.bitpacking import digits_size, pack_digits, unpack_digits
from tests.operator_classes import adversaries, check_constants

F4, F8 = np.dtype("float32"), np.dtype("float64")
#: x = (3, -4, 12): norms 19, 13 and 12
WORKED = np.array([3, -4, 12], np.float64)

EVERY = (
    *(sign(), scaled_sign(), scaled_sign("l2"), column_means(5), column_means()),
    *(ternary(), ternary(2.5), natural(), natural(biased=True), float8(), float8("e5m2", 3)),
    *(uniform_dithering(1, None), uniform_dithering(7, 4), uniform_dithering(127, 4, "max")),
    *(natural_dithering(), exponential_dithering(3.0, 2, None), natural_dithering(4, 5, "max")),
    *(contraction(uniform_dithering(1, None)), linear(), linear(8, 5), linear(3, 4)),
    *(logarithmic(), logarithmic(3), logarithmic(8)),
)
UNBIASED = [codec for codec in EVERY if codec.unbiased]
#: those that claim constants
CLASSED = [
    codec
    for codec in EVERY
    if codec.name not in ("sign", "logarithmic")
    and codec not in (ternary(2.5), scaled_sign("l2"), float8(), float8("e5m2", 3))
]

each = pytest.mark.parametrize("codec", EVERY, ids=repr)


@each
def test_a_codec_that_was_used_can_be_copied_and_pickled(codec):
    """The compiled loops' knowledge of it is left out."""
    x = np.arange(-1000, 1000, dtype=np.float32)
    code = codec.encode(x, random())
    codec.encode_to(x, random(), code)
    codec.decode_to(code, np.empty_like(x))
    for other in (copy.deepcopy(codec), pickle.loads(pickle.dumps(codec))):
        assert other == codec
        np.testing.assert_array_equal(other.encode(x, random()), code)


def random(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def through(codec, x, seed=0):
    x = np.asarray(x)
    code = codec.encode(x, random(seed))
    assert code.dtype == np.uint8
    assert code.size == codec.size(x.size, x.dtype)
    result = codec.decode(code, x.size, x.dtype)
    assert result.shape == x.shape
    assert result.dtype == x.dtype
    return result


def samples(codec, x, count=1000):
    """(count, n) results for one x, a row a draw."""
    return np.stack([through(codec, x, seed) for seed in range(count)])


# -- by hand -----------------------------------------------------------------------------------


def test_signs():
    np.testing.assert_array_equal(through(sign(), [3.0, -4, 1]), [1, -1, 1])
    votes = through(sign(), np.zeros(4000))
    assert set(votes) == {-1, 1}
    assert abs(votes.mean()) < 0.1, "nobody's gradient is nobody's vote"
    np.testing.assert_allclose(through(scaled_sign(), WORKED), [19 / 3, -19 / 3, 19 / 3])
    left = WORKED - through(scaled_sign(), WORKED)
    assert left @ left == pytest.approx(169 - 361 / 3)
    left = WORKED - through(scaled_sign("l2"), WORKED)
    np.testing.assert_allclose(left, [-4.50555, 3.50555, 4.49445], atol=1e-5)
    assert left @ left == pytest.approx(52.789, abs=1e-3)


def test_an_l2_scale_is_no_contraction():
    one_hot = np.eye(16)[0]
    left = one_hot - through(scaled_sign("l2"), one_hot)
    assert left @ left == pytest.approx(1.5)
    with pytest.raises(UnsupportedError, match="constants"):
        scaled_sign("l2").classes(16)


def test_column_means():
    x = np.array([1, -2, 3, -0.5, 0.5, 0.5, -1, -1])
    np.testing.assert_allclose(through(column_means(4), x), [2, -1.25, 2, -1.25, 0.5, 0.5, -1, -1])
    # A column of a matrix is what belongs to one index of the first dimension.
    assert column_means().for_shape((2, 10, 10)) == column_means(100)
    assert column_means().for_shape((80,)) == column_means(80)
    # Short ones are joined, long ones divided.
    assert column_means().for_shape((2048, 1)) == column_means(64)
    assert column_means().for_shape((9, 50)) == column_means(100)
    assert column_means().for_shape((9000,)) == column_means(3000)
    assert column_means().for_shape(()) == column_means(64)


@pytest.mark.parametrize(
    ("codec", "variance"),
    [
        (uniform_dithering(1, None), 78),
        (uniform_dithering(2, None), 26),
        (ternary(), 59),
    ],
)
def test_variances_by_hand(codec, variance):
    found = samples(codec, WORKED, 4000)
    np.testing.assert_allclose(found.mean(0), WORKED, atol=4 * np.sqrt(variance / 4000))
    assert ((found - WORKED) ** 2).sum(1).mean() == pytest.approx(variance, rel=0.1)


def test_natural_compression_by_hand():
    found = samples(natural(), np.array([3.0, -3, 4, 0, 4 / 3]), 4000)
    assert set(found[:, 0]) == {2, 4}
    np.testing.assert_array_equal(set(found[:, 1]), {-4, -2})
    assert set(found[:, 2]) == {4}
    assert set(found[:, 3]) == {0}
    assert (found[:, 0] ** 2).mean() == pytest.approx(10, rel=0.04)
    # The worst case of all is 4/3 of a power of two.
    assert (found[:, 4] ** 2).mean() / (16 / 9) == pytest.approx(9 / 8, rel=0.04)
    biased = through(natural(biased=True), np.array([1.4, 1.6, -2.9, -3.1, 0.0]))
    np.testing.assert_array_equal(biased, [1, 2, -2, -4, 0])


def test_natural_compression_at_the_ends_of_its_range():
    largest = np.finfo(np.float32).max
    tiny = np.float32(2.0**-140)
    found = samples(natural(), np.array([largest, tiny], np.float32), 50)
    assert set(found[:, 0]) <= {np.float32(2.0**127), np.inf}
    assert set(found[:, 1]) <= {0, np.float32(2.0**-126)}


def test_exponential_dithering_by_hand():
    # Norm 13: levels 0, 13/8, 13/4, 13/2, 13.
    found = samples(natural_dithering(4, None), WORKED)
    assert set(found[:, 0]) == {13 / 8, 13 / 4}
    assert set(found[:, 1]) == {-13 / 2, -13 / 4}
    assert set(found[:, 2]) == {13 / 2, 13}


def test_float8_by_hand():
    # The largest element becomes 448; with it, everything is on the grid of E4M3.
    x = np.array([448, 17, 18, 19, -0.001953125, 0.0009, 0.001, 0])
    np.testing.assert_array_equal(
        through(float8(), x), [448, 16, 18, 20, -0.001953125, 0, 0.001953125, 0]
    )
    x = np.array([57344, 1.125, 1.375, 2.0**-16, 2.0**-18])
    np.testing.assert_array_equal(through(float8("e5m2"), x), [57344, 1, 1.5, 2.0**-16, 0])
    # A scale is no power of two in general, and the error at most half a step of the grid.
    x = random(1).standard_normal(1000)
    error = np.abs(through(float8(), x) - x) / np.abs(x)
    assert error[np.abs(x) > 0.01].max() <= 1 / 16 + 1e-12


# -- laws --------------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("dtype", [F4, F8], ids=str)
@settings(max_examples=25)
@given(data=st.data())
def test_zeros_stay_zeros_and_nothing_becomes_nan(codec, dtype, data):
    n = data.draw(st.integers(0, 40))
    x = data.draw(arrays(dtype, n, elements=st.floats(-(2.0**100), 2.0**100, width=32)))
    assert np.isfinite(through(codec, x, data.draw(st.integers(0, 9)))).all()
    zeros = through(codec, np.zeros(n, dtype))
    np.testing.assert_array_equal(abs(zeros), n * [1.0] if codec.name == "sign" else np.zeros(n))


@pytest.mark.parametrize("codec", UNBIASED, ids=repr)
def test_unbiased_codecs_are(codec):
    x = random(3).standard_normal(24) * np.exp(random(4).standard_normal(24))
    count = 1000
    found = samples(codec, x, count)
    deviation = found.std(0) / np.sqrt(count)
    assert (np.abs(found.mean(0) - x) <= 5 * deviation + 1e-6 * np.abs(x)).all()


@pytest.mark.parametrize("codec", CLASSED, ids=repr)
@pytest.mark.parametrize("d", [1, 2, 13])
def test_constants_hold(codec, d):
    draws = 400 if codec.unbiased or codec.name == "contraction" else 1
    for x in adversaries(d):
        check_constants(codec.classes(d), samples(codec, x, draws), x)


def test_constants_by_hand():
    assert natural().classes(9) == codecs.Classes(1, 9 / 8, 1, 9 / 8, 9 / 8)
    assert natural(biased=True).classes(9) == (4 / 9, 4 / 3, 2 / 3, 9 / 8, None)
    # base 2: (2 + 1/2 + 2) / 4 = 9/8, and q = sqrt(16) / 8 = 1/2.
    assert natural_dithering(4, None).classes(16).zeta == pytest.approx(9 / 8 + 1 / 4)
    assert natural_dithering(4, None).classes(256).zeta == pytest.approx(9 / 8 + 2)
    assert uniform_dithering(2, None).classes(3).zeta == pytest.approx(1 + 3 / 16)
    assert contraction(natural()).classes(5).delta == pytest.approx(9 / 8)
    assert scaled_sign().classes(4) == (1 / 4, 1, 1 / 4, 4, None)


def test_what_error_feedback_cannot_follow_is_refused():
    uniform_dithering(127).check_feedback(10**6)
    with pytest.raises(ConfigError, match=r"zeta = .*contraction"):
        uniform_dithering(1).check_feedback(10**6)
    contraction(uniform_dithering(1)).check_feedback(10**6)
    natural_dithering().check_feedback(10**9)
    with pytest.raises(ConfigError, match="zeta"):
        ternary(2.5).check_feedback(100)  # clipped or not
    with pytest.raises(ConfigError, match="zeta"):  # owners feed back by themselves
        World(chain(via=alltoall(uniform_dithering(1))), 2).exchange([np.ones(4000)] * 2)


def test_logarithmic_by_hand():
    # From 1 to 64 in seven levels: r = 2.  3 and 6 are halfway, and go down; 0.4 goes to zero.
    x = [64, -1, 3, -3.01, 6, 40, 0.4, 0]
    np.testing.assert_allclose(
        through(logarithmic(4), np.array([1, *x[:-2]], F4)), [1, 64, -1, 2, -4, 4, 32]
    )
    # 0.4 is less than 64 / 64, which is the least level there may be.
    np.testing.assert_array_equal(
        through(logarithmic(4), np.array(x, F4)), [64, -1, 2, -4, 4, 32, 0, 0]
    )
    np.testing.assert_array_equal(through(logarithmic(4), np.array([0, -5, 0], F4)), [0, -5, 0])
    np.testing.assert_array_equal(through(logarithmic(), np.zeros(3, F4)), [0, 0, 0])


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.sampled_from([3, 4, 8]),
    st.sampled_from([F4, F8]),
    st.integers(0, 10**6),
)
def test_logarithmic_keeps_what_it_says(counts, bits, dtype, seed):
    """Parts end to end are as each alone, errors are within the bounds, signs stay, and the largest
    of all stays what it is but for rounding; a part with NaN is NaN, and no other."""
    codec, draw = logarithmic(bits), random(seed)
    parts = [
        (draw.standard_normal(n) * 10.0 ** draw.integers(-15, 15)).astype(dtype) for n in counts
    ]
    parts[0][0] = 0
    alone = [through(codec, x) for x in parts]
    for x, y in zip(parts, alone, strict=True):
        largest = np.abs(x).max()
        some = np.abs(x)[np.abs(x) > 0]
        first = max(some.min(initial=largest), largest * 2.0 ** (1 - codec.levels))
        r = (largest / first) ** (1 / (codec.levels - 1)) if largest else 1
        bound = np.maximum((r - 1) / (r + 1) * np.abs(x), np.where(np.abs(x) < first, first / 2, 0))
        assert (np.abs(x - y) <= bound + 1e-4 * np.abs(x)).all()
        assert (np.sign(y) * np.sign(x) >= 0).all()
        np.testing.assert_allclose(np.abs(y).max(), largest, rtol=1e-4)
    together = codec.of_parts(counts)
    joint = np.concatenate(parts)
    np.testing.assert_array_equal(through(together, joint), np.concatenate(alone))
    joint[0] = np.nan
    alone[0][:] = np.nan
    frame = encode_coded(together, joint, draw)
    decoded = decode_coded(together, frame, joint.size, dtype)[1]
    np.testing.assert_array_equal(decoded, np.concatenate(alone))
    with pytest.raises(PayloadError):
        decode_coded(codec.of_parts([*counts, 1]), frame, joint.size + 1, dtype)


# -- bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "bits"),
    [
        (sign(), 1),
        (scaled_sign(), 1),
        (column_means(2048), 2112 / 2048),
        (linear(8, 2048), 8 + 32 / 2048),
        (linear(4, None), 4),
        (logarithmic(4), 4),
        (logarithmic(8), 8),
        (ternary(), 1.6),
        (natural(), 9),
        (float8(bucket=None), 8),
        (uniform_dithering(1, None), 1.6),
        (uniform_dithering(7, None), 64 / 16),
        (uniform_dithering(7, 512), 64 / 16 + 1 / 16),
        (natural_dithering(4, None), 64 / 20),
        (uniform_dithering(15, None), 5),
        (uniform_dithering(31, None), 6),
    ],
    ids=repr,
)
def test_bits_an_element(codec, bits):
    n = 2048 * 320
    assert codec.bits_per_element(n) == pytest.approx(bits, rel=1e-3)
    assert through(codec, random(0).standard_normal(n).astype(F4)).size == n


def test_one_bit_columns_save_31_times():
    shape = (320, 2048)
    codec, n = column_means().for_shape(shape), 320 * 2048
    assert 4 * n / coded_size(codec, n, F4) == pytest.approx(31.03, abs=0.01)


@pytest.mark.parametrize("base", [2, 3, 4, 5, 7, 10, 15, 16, 17, 255, 256, 257, 65535])
def test_digits(base):
    for n in (0, 1, 2, 7, 39, 40, 41, 1000):
        digits = random(n).integers(0, base, n).astype(np.min_scalar_type(base - 1))
        digits[:3] = base - 1
        packed = pack_digits(digits, base)
        assert packed.size == digits_size(n, base)
        np.testing.assert_array_equal(unpack_digits(packed, n, base), digits)
    bits = 8 * digits_size(10**6, base) / 10**6
    assert bits <= min(np.ceil(np.log2(base)), 1.16 * np.log2(base)) + 1e-4


# -- the frame ---------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("n", [0, 1, 9])
@pytest.mark.parametrize("sparse", [False, True])
def test_frames_arrive(codec, n, sparse):
    x = random(n).standard_normal(n).astype(F4)
    indices = 3 * np.arange(n) + 1 if sparse else None
    total = 3 * n + 5 if sparse else None
    frame = encode_coded(codec, x, random(), indices, total)
    assert frame.size == coded_size(codec, n, F4, total)
    assert frame.size % 8 == 0
    for count in (n, None):
        found, values = decode_coded(codec, frame, count, F4, total)
        np.testing.assert_array_equal(values, through(codec, x))
        if sparse:
            np.testing.assert_array_equal(found, indices)
        else:
            assert found is None


@each
@pytest.mark.parametrize("n", [1, 2, 9, 100])
def test_frames_with_packed_indices_arrive(codec, n):
    x, indices, total = random(n).standard_normal(n).astype(F4), 30 * np.arange(n) + 7, 30 * n + 5
    frame = encode_coded(codec, x, random(), indices, total, packed=True)
    assert frame.size % 8 == 0
    plain_size = coded_size(codec, n, F4, total)
    assert frame.size < plain_size if n > 4 else frame.size <= plain_size
    for count in (n, None):
        found, values = decode_coded(codec, frame, count, F4, total)
        np.testing.assert_array_equal(found, indices)
        np.testing.assert_array_equal(values, through(codec, x))
    for wrong in (frame[:-8], np.concatenate([frame, np.zeros(8, np.uint8)]), frame[:20]):
        with pytest.raises(PayloadError):
            decode_coded(codec, wrong, n, F4, total)


@each
def test_what_is_not_finite_arrives_as_nan(codec):
    for bad in (np.nan, np.inf, -np.inf):
        x = np.array([1, bad, 2], F4)
        frame = encode_coded(codec, x, random())
        assert frame.size == coded_size(codec, 3, F4)
        assert np.isnan(decode_coded(codec, frame, 3, F4)[1]).all()


def test_other_options_are_noticed():
    x = np.ones(8, F4)
    frame = encode_coded(uniform_dithering(7, norm="max"), x, random())
    for other in (uniform_dithering(7, norm="l2"), uniform_dithering(6), sign()):
        with pytest.raises(PayloadError):
            decode_coded(other, frame, 8, F4)
    for count, dtype in ((7, F4), (8, F8)):
        with pytest.raises(PayloadError):
            decode_coded(uniform_dithering(7, norm="max"), frame, count, dtype)


def test_parts_that_do_not_fit():
    with pytest.raises(ConfigError, match="1e-30"):
        exponential_dithering(base=10.0, levels=60)
    with pytest.raises(ConfigError, match="unbiased"):
        contraction(sign())


@each
def test_codecs_travel_as_configuration(codec):
    assert from_config(codec.to_config()) == codec
