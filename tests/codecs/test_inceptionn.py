"""INCEPTIONN's codes: by hand, by their bound, and in frames whose size varies."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_compress import EF21, INCEPTIONN
from hvd_compress.blocks import allgather, alltoall, inceptionn, top_k
from hvd_compress.codecs.frame import decode_coded, encode_coded
from hvd_compress.engines.lockstep import World
from hvd_compress.errors import ConfigError, PayloadError, UnsupportedError

F4 = np.dtype("float32")
RANDOM = np.random.default_rng(0)


def through(codec, x):
    return codec.decode(codec.encode(x, RANDOM), x.size, x.dtype)


def test_the_bytes_by_hand():
    """The bound is 2^-10 and the middle 2^-5, so 8 bits count 2^-12: 0.3 is 9830.4 times 2^-15, and
    9830 is 0x2666; 0.01 is 40.96 times 2^-12; 2^-10 is 4 times; 0.0005 is less than 2^-10."""
    x = np.array([1.5, 0.3, -0.01, 0.0005, -2.0, 2.0**-10], F4)
    code = inceptionn().encode(x, RANDOM)
    tags = "1b 07"  # 3 + 4 * 2 + 16 * 1 + 64 * 0, and 3 + 4 * 1
    assert code.tobytes() == bytes.fromhex(f"{tags} 0000c03f 000000c0 6626 a8 04")
    arrived = [1.5, 9830 / 2**15, -40 / 2**12, 0, -2, 2.0**-10]
    np.testing.assert_array_equal(through(inceptionn(), x), np.array(arrived, F4))


def test_float64_keeps_all_its_bits_from_one_on():
    x = np.array([np.pi, -1e300, 0.75, 2.0**-11])
    np.testing.assert_array_equal(through(inceptionn(), x), [np.pi, -1e300, 0.75, 0])
    assert inceptionn().encode(x, RANDOM).size == 1 + 2 * 8 + 2


@pytest.mark.parametrize("b", range(-14, 0))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_no_value_changes_by_the_bound_and_none_grows(b, dtype):
    bound = 2.0**b
    draws = np.random.default_rng(b + 20)
    x = (draws.choice([-1, 1], 5000) * 2.0 ** draws.uniform(b - 3, 3, 5000)).astype(dtype)
    x[:4] = bound, np.nextafter(x.dtype.type(bound), 0), 0, -0.0
    y = through(inceptionn(bound), x)
    assert (np.abs(x - y) < bound).all()
    assert (np.abs(y) <= np.abs(x)).all()
    assert (np.sign(y) * np.sign(x) >= 0).all()
    assert ((y == 0) == (np.abs(x) < bound)).all(), "what reaches the bound arrives"
    np.testing.assert_array_equal(through(inceptionn(bound), y), y)


def test_the_size_follows_from_the_values():
    for n in (0, 1, 4, 5, 100):
        zeros, ones = np.zeros(n, F4), np.ones(n, F4)
        assert inceptionn().encode(zeros, RANDOM).size == -(-n // 4)
        assert inceptionn().encode(ones, RANDOM).size == -(-n // 4) + 4 * n


@pytest.mark.parametrize("n", [0, 1, 3, 4, 50])
def test_frames_arrive(n):
    x = np.random.default_rng(n).standard_normal(n).astype(F4) / 16
    codec = inceptionn()
    frame = encode_coded(codec, x, RANDOM)
    assert frame.size % 8 == 0
    np.testing.assert_array_equal(decode_coded(codec, frame, n, F4)[1], through(codec, x))
    for place in range(frame.size):
        damaged = frame.copy()
        damaged[place] ^= 1 << place % 8
        with pytest.raises(PayloadError):
            decode_coded(codec, damaged, n, F4)
    for wrong in (frame[:-8], np.concatenate([frame, np.zeros(8, np.uint8)]), frame[:-1]):
        with pytest.raises(PayloadError):
            decode_coded(codec, wrong, n, F4)
    for other in (inceptionn(2.0**-9), inceptionn(0.5)):
        with pytest.raises(PayloadError):
            decode_coded(other, frame, n, F4)


def test_what_is_not_finite_arrives_as_nan():
    for bad in (np.nan, np.inf, -np.inf):
        frame = encode_coded(inceptionn(), np.array([1, bad, 2], F4), RANDOM)
        assert np.isnan(decode_coded(inceptionn(), frame, 3, F4)[1]).all()


def test_any_bytes_are_values_or_an_error():
    """What a checksum would not tell."""
    draws = np.random.default_rng(1)
    told = 0
    for size in range(30):
        code = draws.integers(0, 256, size, np.uint8)
        try:
            assert inceptionn().decode(code, 9, F4).shape == (9,)
        except ValueError:
            told += 1
    assert told


def test_only_allgather_sends_what_varies():
    with pytest.raises(ConfigError, match="varies: allgather"):
        alltoall(inceptionn())
    with pytest.raises(ConfigError, match="only alone"):
        allgather(top_k(0.1), inceptionn())
    with pytest.raises(ConfigError, match="only alone"):
        EF21(values=inceptionn())
    with pytest.raises(UnsupportedError, match="allgather"):
        inceptionn().size(3, F4)


@pytest.mark.parametrize("bound", [0, 0.3, 1.0, 2.0**-15, "2**-10", True])
def test_bad_bounds(bound):
    for make in (inceptionn, INCEPTIONN):
        with pytest.raises(ConfigError, match="bound"):
            make(bound)
    with pytest.raises(ConfigError, match="error_feedback"):
        INCEPTIONN(error_feedback="yes")


def test_feedback_sends_what_is_small_in_the_end():
    """Steps of 0.75 bounds: nothing, 1.5 bounds, of which 1.5 arrive in units of a quarter; and so
    on, while without feedback nothing ever arrives."""
    gradient = np.full(3, 0.75 * 2.0**-10, F4)
    world, lossy = World(INCEPTIONN(), 2), World(INCEPTIONN(error_feedback=False), 2)
    means = [world.exchange([gradient, gradient])[0].mean[0] * 2**10 for _ in range(4)]
    assert means == [0, 1.5, 0, 1.5]
    assert not lossy.exchange([gradient, gradient])[0].mean.any()
