"""Codes of indices: their bytes by hand, which of them is taken, and that damage is noticed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_compress import PayloadError, kernels
from hvd_compress.kernels import reference
from hvd_compress.wire import decode_sparse, encode_sparse
from hvd_compress.wire.frame import best_parameter, gaps_of, pack, unpack

GAMMA, DELTA = 64, 65


@pytest.mark.parametrize(
    ("b", "code"),
    [
        # L = 0, 1, 0, 2: unary 1 01 1 001; fields 1 of 11 and 10 of 110, the lowest bit first
        (GAMMA, "40 4d 05"),
        # M = 0, 1, 0, 1 of L + 1 = 1, 2, 1, 3: unary 1 01 1 01; fields 0 of 10, 1 of 11; as above
        (DELTA, "41 2d 02 05"),
    ],
)
def test_the_bytes_of_elias_codes(b, code):
    """Gaps of 0, 2, 0 and 5 are 1, 11, 1 and 110 in binary, with one added."""
    indices = np.array([0, 3, 4, 10])
    out = np.zeros(len(bytes.fromhex(code)), np.uint8)
    pack(gaps_of(indices, "int64"), b, out)
    assert out.tobytes() == bytes.fromhex(code)
    for padding in range(8):
        found = unpack(np.append(out, np.zeros(padding, np.uint8)), 4, 11)
        np.testing.assert_array_equal(found, indices)
    for wrong in (np.append(out, np.zeros(8, np.uint8)), out[:-1], out[:1]):
        with pytest.raises(ValueError, match="indices"):
            unpack(wrong, 4, 11)
    for count, n in ((4, 10), (5, 11), (400, 1000)):
        with pytest.raises(ValueError, match="indices"):
            unpack(out, count, n)


@settings(max_examples=150, deadline=None)
@given(
    n=st.sampled_from([1, 2, 50, 5000, 10**6, 2**40, 2**48]),
    count=st.integers(1, 300),
    spread=st.integers(0, 48),
    nested=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_elias_codes_are_those_of_numpy(n, count, spread, nested, seed):
    random = np.random.default_rng(seed)
    places = random.choice(random.integers(0, n, 3), count) + random.integers(0, 1 << spread, count)
    places = np.unique(np.append(places[places < n], n - 1))
    gaps = np.diff(places, prepend=-1) - 1
    own, expected = (np.zeros(16 * gaps.size + 16, np.uint8) for _ in range(2))
    kernels.loops().elias_pack(gaps, nested, own)
    reference.elias_pack(gaps, nested, expected)
    np.testing.assert_array_equal(own, expected)
    for b in (1, 5, 47):
        assert kernels.loops().index_bits(gaps, b) == reference.index_bits(gaps, b)
    code = np.zeros(_size(gaps, nested), np.uint8)
    kernels.loops().elias_pack(gaps, nested, code)
    for unpack_with in (kernels.loops().elias_unpack, reference.elias_unpack):
        np.testing.assert_array_equal(unpack_with(code, places.size, nested, n), places)
        if n > 1:
            with pytest.raises(ValueError, match="indices"):
                unpack_with(code, places.size, nested, n - 1)


def _size(gaps, nested):
    """By definition, one gap after the other."""
    lengths = [int(gap + 1).bit_length() - 1 for gap in gaps]
    widths = [(length + 1).bit_length() - 1 for length in lengths]
    parts = [sum(widths) + gaps.size, sum(widths), sum(lengths)]
    parts = parts if nested else [sum(lengths) + gaps.size, sum(lengths)]
    return sum(-(-part // 8) for part in parts)


@settings(max_examples=500, deadline=None)
@given(
    code=st.binary(max_size=40),
    count=st.integers(1, 50),
    unpacks=st.one_of(
        st.tuples(st.just("elias_unpack"), st.booleans()),
        st.tuples(st.just("rice_unpack"), st.integers(0, 48)),
    ),
)
def test_damaged_codes_never_give_indices_out_of_range(code, count, unpacks):
    results, (name, option) = [], unpacks
    for loops in (kernels.loops(), reference):
        try:
            found = getattr(loops, name)(np.frombuffer(code, np.uint8), count, option, 1000)
        except ValueError:
            results.append(None)
            continue
        assert found.size == count
        assert (np.diff(found) > 0).all()
        assert 0 <= found[0] <= found[-1] < 1000
        results.append(found.tolist())
    assert results[0] == results[1]


@settings(max_examples=100, deadline=None)
@given(
    count=st.integers(1, 300),
    run=st.sampled_from([1, 2, 8, 32]),
    exponent=st.integers(3, 47),
    seed=st.integers(0, 100),
)
def test_the_shortest_code_is_taken_and_its_size_is_exact(count, run, exponent, seed):
    n = 2**exponent
    starts = np.random.default_rng(seed).integers(0, n, count)
    places = np.unique((starts[:, None] + np.arange(run)).reshape(-1))
    gaps = gaps_of(places[places < n], "int64")
    b, size = best_parameter(gaps, n)
    rice = {c: 1 + -(-gaps.size * c // 8) + _unary(gaps, c) for c in range(49)}
    sizes = {**rice, GAMMA: 1 + _size(gaps, False), DELTA: 1 + _size(gaps, True)}
    assert size == sizes[b] <= min(sizes.values()) + 1  # b is the best by bits, not by bytes
    code = np.zeros(size, np.uint8)
    pack(gaps, b, code)
    np.testing.assert_array_equal(unpack(code, gaps.size, n), np.cumsum(gaps + 1) - 1)


def _unary(gaps, b):
    return -(-(int((gaps >> b).sum()) + gaps.size) // 8)


@pytest.mark.parametrize(
    ("run", "density", "b"), [(1, 0.01, None), (4, 0.2, GAMMA), (64, 1e-3, DELTA)]
)
def test_which_code_is_taken(run, density, b):
    n = 2**18
    starts = np.random.default_rng(0).choice(n // run, int(n * density / run), replace=False)
    places = np.sort((run * starts[:, None] + np.arange(run)).reshape(-1))
    found, _ = best_parameter(gaps_of(places, "int32"), n)
    assert found == b if b else found <= 48


def test_rows_of_dead_units_take_a_bit_an_index():
    """And a frame whose code is of no known kind is refused, as it is by older versions."""
    places = np.concatenate([np.arange(s, s + 512) for s in (0, 70_000, 500_000)])
    frame = encode_sparse(places, np.ones(places.size, np.float16), 10**6, "packed")
    assert frame[16] == DELTA
    assert 8 * (frame.size - 16 - 2 * places.size) / places.size < 1.1
    np.testing.assert_array_equal(decode_sparse(frame, 10**6, "float16")[0], places)
    for b in (49, 63, 66, 255):
        with pytest.raises(ValueError, match="valid parameter"):
            unpack(np.array([b, 255, 255, 255], np.uint8), 3, 10)
    frame[16] = 66
    with pytest.raises(PayloadError, match="checksum"):
        decode_sparse(frame, 10**6, "float16")
