"""The compiled loops of codecs against the codecs' definitions in NumPy, bit for bit."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_compress import Context, codecs, kernels
from hvd_compress.codecs import base, plus_minus
from hvd_compress.codecs.at_random import own_generator
from hvd_compress.kernels import codecs as loops
from hvd_compress.kernels import reference
from tests.kernels.test_kernels import unaligned

CODECS = [
    codecs.sign(),
    codecs.scaled_sign(),
    codecs.scaled_sign("l2"),
    plus_minus(0.3),
    codecs.column_means(33),
    codecs.column_means(2048),
    codecs.column_means(),
    codecs.linear(),
    codecs.linear(8, 4096),
    *(codecs.linear(bits, 100) for bits in range(2, 8)),
    *(codecs.uniform_dithering(levels, 512, "max") for levels in (1, 2, 4, 7, 15, 60, 127)),
    codecs.uniform_dithering(7, None, "l2"),
    codecs.uniform_dithering(9, 21, "l2"),
    codecs.uniform_dithering(127, 2000, "l2"),
    codecs.natural_dithering(),
    codecs.natural_dithering(4, 3, "max"),
    codecs.exponential_dithering(1.2, 127, None),
    codecs.ternary(),
    codecs.ternary(2.5),
    codecs.natural(),
    codecs.natural(biased=True),
    codecs.float8(),
    codecs.float8("e4m3", 512),
    codecs.float8("e5m2", 13),
]
DTYPES = [np.dtype("float32"), np.dtype("float64")]
SIZES = st.one_of(st.integers(0, 300), st.sampled_from([2047, 4096, 4097, 16_385, 50_001, 100_000]))
KINDS = ["normal", "wide", "ties", "zeros", "halves", "subnormal", "finite", "special"]


def drawn(random, n, kind, dtype):
    limits = np.finfo(dtype)
    special = [0.0, -0.0, 1, -1, 1.5, limits.max, -limits.max, limits.tiny, -limits.tiny / 8]
    special += [limits.smallest_subnormal, limits.max / 2, 2.0**-126, 2.0**-130]
    x = random.standard_normal(n)
    if kind == "wide":
        x *= np.exp(10 * random.standard_normal(n))
    elif kind == "ties":
        x = np.round(2 * x)
    elif kind == "zeros":
        x *= 0
    elif kind == "halves":  # in the middle of two levels of eight bits, or beside it
        x = (random.integers(-126, 126, n) + 0.5) * (1 + limits.eps * random.integers(-2, 3, n))
        x[::50] = 127
    elif kind == "subnormal":
        x *= float(limits.tiny) / 2
    elif kind == "finite":
        x = random.choice(np.array(special, dtype), n)
    elif kind == "special":
        x = random.choice(np.array([*special, np.nan, np.inf, -np.inf], dtype), n)
    return x.astype(dtype)


@pytest.fixture(autouse=True)
def compiled():
    assert kernels.is_compiled(), "make setup builds the loops"


@pytest.fixture(params=["baseline", "avx2", "avx512"])
def instructions(request):
    use = kernels.native.codecs.use_instructions
    if not use(["baseline", "avx2", "avx512"].index(request.param)):
        pytest.skip("not on this machine")
    yield
    use(-1)


def generators(seed):
    """Two of the same state, somewhere within a block of the stream."""
    pair = [own_generator(Context(seed=seed)) for _ in "01"]
    for random in pair:
        random.random(seed % 17, np.float32)
    return pair


def written(codec, x, random):
    """The result of ``encode`` by the loops."""
    code = np.empty(codec.size(x.size, x.dtype), np.uint8)
    codec.encode_to(x, random, code)
    return code


def read(codec, code, n, dtype):
    """The result of ``decode`` by the loops."""
    out = np.empty(n, dtype)
    codec.decode_to(code, out)
    return out


def in_numpy(function):
    """The same function where nothing is compiled."""

    def call(*arguments):
        with mock.patch.object(base, "is_compiled", return_value=False), np.errstate(all="ignore"):
            return function(*arguments)

    return call


def same_state(one, other):
    """Whether what they draw from now on is the same."""
    return [one.random(3, np.float32).tolist(), one.random(5).tolist()] == [
        other.random(3, np.float32).tolist(),
        other.random(5).tolist(),
    ]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@settings(max_examples=40, deadline=None)
@given(
    n=SIZES,
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES),
    offset=st.integers(0, 9),
    seed=st.integers(0, 1000),
)
def test_codes_are_those_of_numpy(codec, n, kind, dtype, offset, seed):
    assert codec._loops is not None
    data = np.random.default_rng(seed)
    x = unaligned(drawn(data, n, kind, dtype), offset)
    before = x.copy()
    own, theirs = generators(seed)
    code = unaligned(np.full(codec.size(n, dtype), 7, np.uint8), offset)
    codec.encode_to(x, own, code)
    with np.errstate(all="ignore"):
        expected = codec.encode(x, theirs)
    np.testing.assert_array_equal(code, expected)
    np.testing.assert_array_equal(x, before)
    assert same_state(own, theirs)
    with np.errstate(all="ignore"):
        values = codec.decode(code, n, dtype)
        total = drawn(data, n, "normal", dtype)
        out = unaligned(total, offset)
        codec.decode_to(code, out, add=True)
        np.testing.assert_array_equal(out, total + values)
        out[:] = total
        codec.take_off(code, out)
        np.testing.assert_array_equal(out, total - values)
    codec.decode_to(code, out)
    np.testing.assert_array_equal(out, values)
    np.testing.assert_array_equal(np.signbit(out[out == 0]), np.signbit(values[values == 0]))


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@settings(max_examples=20, deadline=None)
@given(n=SIZES, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 1000))
def test_any_bytes_are_decoded_as_by_numpy(codec, n, dtype, seed):
    """Whatever a damaged message holds."""
    code = np.random.default_rng(seed).integers(0, 256, codec.size(n, dtype), np.uint8)
    with np.errstate(all="ignore"):
        expected = codec.decode(code, n, dtype)
    np.testing.assert_array_equal(read(codec, code, n, dtype), expected)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@settings(max_examples=15, deadline=None)
@given(
    n=SIZES,
    kind=st.sampled_from(KINDS),
    offset=st.integers(0, 9),
    count=st.integers(0, 3),
    adds=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_what_is_fed_back_is_as_in_numpy(codec, n, kind, offset, count, adds, seed):
    """Sums, their codes and what these leave out, in one pass; in place, and beside it."""
    data, dtype = np.random.default_rng(seed), np.dtype("float32")
    base, x = (unaligned(drawn(data, n, kind, dtype), offset) for _ in "01")
    codes = [written(codec, drawn(data, n, "normal", dtype), own_generator(Context(seed=i)))
             for i in range(count)]  # fmt: skip
    found = []
    for own, random in zip((codec.feed, in_numpy(codec.feed)), generators(seed), strict=True):
        code = unaligned(np.full(codec.size(n, dtype), 7, np.uint8), offset)
        if adds:  # as of a residual and a gradient
            left, old = unaligned(base.copy(), offset), unaligned(x.copy(), offset)
            arrays = left, old, old
        else:  # as of an owner's sums
            left, old = unaligned(np.full(n, 7, dtype), offset), base
            arrays = base, None, None
        finite = own(*arrays, codes, random, left, code, loops.threads())
        np.testing.assert_array_equal(old, base)
        found.append((finite, left, code) if finite[0] else (finite,))
    assert found[0][0] == found[1][0]
    for one, other in zip(found[0][1:], found[1][1:], strict=True):
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@settings(max_examples=10, deadline=None)
@given(
    n=SIZES,
    kind=st.sampled_from(KINDS),
    offset=st.integers(0, 9),
    count=st.integers(1, 3),
    by=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_means_of_codes_are_those_of_numpy(codec, n, kind, offset, count, by, seed):
    data, dtype = np.random.default_rng(seed), np.dtype("float32")
    with np.errstate(all="ignore"):
        codes = [written(codec, drawn(data, n, kind, dtype), own_generator(Context(seed=i)))
                 for i in range(count)]  # fmt: skip
    for add in {True, count > 1}:
        found = []
        for own in (codec.mean, in_numpy(codec.mean)):
            out = unaligned(np.full(n, 7, dtype), offset)
            finite = own(codes, by, out, add, loops.threads())
            found.append((finite, out))
        (finite, out), (expected, values) = found
        assert finite == expected
        np.testing.assert_array_equal(out, values)
        np.testing.assert_array_equal(np.signbit(out[out == 0]), np.signbit(values[values == 0]))


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_instruction_set_has_the_same_bits(codec, dtype, instructions):
    random = np.random.default_rng(0)
    for n in (1, 77, 40_003):
        for kind in ("normal", "halves", "finite"):
            x = drawn(random, n, kind, dtype)
            with np.errstate(all="ignore"):
                expected = codec.encode(x, own_generator(Context()))
                values = codec.decode(expected, n, dtype)
            code = written(codec, x, own_generator(Context()))
            np.testing.assert_array_equal(code, expected)
            np.testing.assert_array_equal(read(codec, code, n, dtype), values)
            if dtype == np.float32 and kind == "normal":
                assert fed(codec, x) == fed(codec, x, in_numpy)


def fed(codec, x, form=lambda function: function):
    """The bytes that a code, a pass of feedback and a mean of two codes leave."""
    code, left, kept = np.empty(codec.size(x.size, x.dtype), np.uint8), x.copy(), 2 * x
    plain, out, mean = np.empty_like(code), np.empty_like(x), np.empty_like(x)
    random, threads = own_generator(Context()), loops.threads()
    form(codec.encode_to)(x, random, plain)
    form(codec.decode_to)(plain, out)
    form(codec.feed)(left, kept, kept, [], random, left, code, threads)
    form(codec.mean)([code, code], 3, mean, True, threads)
    return [a.tobytes() for a in (plain, out, code, left, kept, mean)]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_threads_change_nothing(codec, monkeypatch):
    x = np.random.default_rng(0).standard_normal(700_001, np.float32)
    expected = fed(codec, x, in_numpy)
    for number in (1, 2, 3, 7):
        monkeypatch.setattr(loops, "threads", lambda number=number: number)
        assert fed(codec, x) == expected


def test_threads_draw_what_the_generator_does(monkeypatch):
    monkeypatch.setattr(loops, "threads", lambda: 3)
    own, theirs = generators(5)
    out = np.zeros(100_000, np.float32)
    loops.draw(own, out)
    np.testing.assert_array_equal(out, theirs.random(out.size, np.float32))


@settings(max_examples=60, deadline=None)
@given(
    n=SIZES,
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES),
    term=st.sampled_from(["plain", "magnitude", "square"]),
    shift=st.sampled_from([0.0, 0.1, -3.0]),
    seed=st.integers(0, 1000),
)
def test_sums_are_those_of_numpy(n, kind, dtype, term, shift, seed):
    x = drawn(np.random.default_rng(seed), n, kind, dtype)
    with np.errstate(all="ignore"):
        own = loops.total(x, term, shift)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loops, "is_compiled", lambda: False)
            expected = loops.total(x, term, shift)
    np.testing.assert_array_equal(own, expected)
    if n and kind == "normal":
        terms = {"plain": x, "magnitude": abs(x), "square": (x.astype(float) - shift) ** 2}
        assert own == pytest.approx(float(np.sum(terms[term], dtype=float)), rel=1e-9, abs=1e-9)


def test_sums_by_hand():
    """The halves of 2 + 16 lanes' sums are added: an order in which 2^53 + 1 survives."""
    rows = np.zeros((2, 20))
    rows[0, [0, 1, 17]] = 2.0**53, 1, 1
    rows[1, :] = np.arange(20)
    assert reference.sums(rows).tolist() == [2.0**53 + 2, 190]
    assert reference.sums(np.zeros((3, 0))).tolist() == [0, 0, 0]
    assert reference.sums(np.ones((2, 5000))).tolist() == [5000, 5000]


def test_other_generators_serve_as_well():
    x = np.random.default_rng(0).standard_normal(5000, np.float32)
    codec = codecs.uniform_dithering()
    code = written(codec, x, np.random.default_rng(1))
    np.testing.assert_array_equal(code, codec.encode(x, np.random.default_rng(1)))


def test_more_than_eight_bits_are_left_to_numpy():
    codec = codecs.uniform_dithering(1000)
    assert codec._loops is None
    x = np.random.default_rng(0).standard_normal(5000, np.float32)
    out = np.ones_like(x)
    code = written(codec, x, own_generator(Context()))
    codec.decode_to(code, out, add=True)
    values = read(codec, code, x.size, x.dtype)
    np.testing.assert_array_equal(out, 1 + values)
    codec.take_off(code, out)
    np.testing.assert_array_equal(out, 1 + values - values)


@pytest.mark.parametrize("n", [1000, 100_000])
def test_draws_need_no_compiler(n, monkeypatch):
    found = np.empty((2, n), np.float32)
    for compiled, out in zip((True, False), found, strict=True):
        monkeypatch.setattr(loops, "is_compiled", lambda compiled=compiled: compiled)
        loops.draw(own_generator(Context()), out)
    np.testing.assert_array_equal(*found)


def test_wrong_sizes_are_refused_before_anything_is_written():
    x, codec = np.ones(100, np.float32), codecs.linear(8, 10)
    with pytest.raises(ValueError, match="sizes"):
        codec.encode_to(x, np.random.default_rng(0), np.zeros(3, np.uint8))
    with pytest.raises(ValueError, match="sizes"):
        codec.decode_to(np.zeros(3, np.uint8), x)
    with pytest.raises(ValueError, match="sizes"):
        codecs.sign().decode_to(np.zeros(3, np.uint8), x)
    with pytest.raises(ValueError, match="contiguous"):
        codec.decode_to(np.zeros(110, np.uint8), np.ones(100, np.float32)[::-1])
    assert (x == 1).all()
