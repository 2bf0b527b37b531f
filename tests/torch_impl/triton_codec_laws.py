"""Codecs in Triton against their definitions in NumPy, bit for bit; see triton_laws.py."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_compress import (
    FP8,
    QSGD,
    Context,
    EFSignSGD,
    NaturalCompression,
    OneBit,
    SignSGD,
    TernGrad,
    codecs,
)
from hvd_compress.codecs.compiled import Compiled
from hvd_compress.codecs.frame import decode_coded, encode_sent
from hvd_compress.codecs.plus_minus import plus_minus
from hvd_compress.engines.lockstep import run
from hvd_compress.kernels import codecs as loops
from hvd_compress.kernels import reference
from hvd_compress.operators.random_k import own_generator
from hvd_compress.torch import backend
from tests.kernels.test_codecs import KINDS, drawn, generators, same_state
from tests.kernels.test_kernels import unaligned
from tests.torch_impl.triton_laws import (
    DEVICE,
    FEW,
    INTERPRETED,
    compiled_for_gpus,
    on_device,
    waits_of,
)

FLOAT32 = np.dtype("float32")
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
    *(codecs.linear(bits, 100) for bits in (2, 5)),
    *(codecs.uniform_dithering(levels, 512, "max") for levels in (1, 2, 7, 60, 127)),
    codecs.uniform_dithering(7, None, "l2"),
    codecs.uniform_dithering(9, 21, "l2"),
    codecs.natural_dithering(),
    codecs.exponential_dithering(1.2, 127, None),
    codecs.ternary(),
    codecs.ternary(2.4),
    codecs.natural(),
    codecs.natural(biased=True),
    codecs.float8(),
    codecs.float8("e4m3", 512),
    codecs.float8("e5m2", 13),
]
SIZES = st.one_of(st.integers(1, 300), st.sampled_from([1023, 1024, 4096, 4097, 10_000]))

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


@pytest.fixture(scope="module")
def placed():
    from hvd_compress.torch.triton_codecs import placed

    return placed


def assert_same(own, expected):
    """To the bit, the sign of zero included; one NaN is as good as another."""
    own = own.cpu().numpy()
    np.testing.assert_array_equal(own, expected)
    signs = np.signbit(own), np.signbit(expected)
    np.testing.assert_array_equal(*(np.where(np.isnan(expected), False, sign) for sign in signs))


#: two kinds of each codec, so that those with the same kernels have all, and some have many blocks
IN_TURN = [
    (codec, (300, 1, 1025, 33, 4097)[number % 5], KINDS[number % 8], number % 6)
    for number, codec in enumerate(codec for codec in CODECS for _ in range(2))
]


@pytest.mark.parametrize(("codec", "n", "kind", "offset"), IN_TURN, ids=repr)
def test_codes_are_those_of_numpy(placed, codec, n, kind, offset):
    assert_codes(placed, codec, n, kind, offset, 0)


@pytest.mark.skipif(INTERPRETED and FEW, reason="takes long in the interpreter")
@pytest.mark.parametrize("codec", CODECS, ids=repr)
@settings(max_examples=5, deadline=None)
@given(
    n=SIZES,
    kind=st.sampled_from(KINDS),
    offset=st.integers(0, 5),
    seed=st.integers(0, 1000),
)
def test_drawn_codes_are_those_of_numpy(placed, codec, n, kind, offset, seed):
    assert_codes(placed, codec, n, kind, offset, seed)


def assert_codes(placed, codec, n, kind, offset, seed):
    assert isinstance(codec, Compiled)
    data = np.random.default_rng(seed)
    values = drawn(data, n, kind, FLOAT32)
    x = on_device(values, offset)
    coder = placed(codec, x)
    own, theirs = generators(seed)
    code, sent = np.full(codec.size(n, FLOAT32), 7, np.uint8), coder.zeros(n, FLOAT32)
    assert coder.put(x, own, code, sent) is bool(np.isfinite(values).all())
    if not np.isfinite(values).all():
        assert (code == 7).all()
        assert same_state(own, theirs)
        return
    with np.errstate(all="ignore"):
        expected = codec._to_bytes(values, theirs)
        decoded = codec._from_bytes(expected, n, FLOAT32)
    np.testing.assert_array_equal(code, expected)
    assert same_state(own, theirs)
    assert_same(x, values)
    assert_same(sent, decoded)
    total = drawn(data, n, "normal", FLOAT32)
    out = on_device(total, offset)
    coder.decode_to(unaligned(code, offset), out, add=True)
    with np.errstate(all="ignore"):
        assert_same(out, total + decoded)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@settings(max_examples=3, deadline=None)
@given(n=SIZES, seed=st.integers(0, 1000))
def test_damaged_bytes_are_decoded_as_by_numpy(placed, codec, n, seed):
    code = np.random.default_rng(seed).integers(0, 256, codec.size(n, FLOAT32), np.uint8)
    with np.errstate(all="ignore"):
        expected = codec._from_bytes(code, n, FLOAT32)
    out = torch.zeros(n, device=DEVICE)
    placed(codec, out).decode_to(code, out)
    assert_same(out, expected)


@pytest.mark.parametrize("n", [1, 17, 4096, 9001])
@pytest.mark.parametrize("length", [5, 4096, 5000, None])
def test_orders_of_sums_are_those_of_numpy(placed, n, length):
    """Of more elements than are added up in one go, and in runs of which the last one is short."""
    from hvd_compress.torch import triton_sum_kernels, triton_sums

    x = drawn(np.random.default_rng(n), n, "wide", FLOAT32)
    length = length or n
    found = triton_sums.sums(on_device(x), length, triton_sum_kernels.SQUARE).cpu().numpy()
    runs = [np.square(x[i : i + length], dtype=np.float64) for i in range(0, n, length)]
    np.testing.assert_array_equal(found, [reference.sums(run.reshape(1, -1))[0] for run in runs])


@settings(max_examples=30, deadline=None)
@given(words=st.sampled_from([0, 1, 2, 3, 5, 8, 1001, 1002]), seed=st.integers(0, 100))
def test_streams_go_on_where_they_would(words, seed):
    """After numbers of half a word and of a whole one, whether they were drawn or skipped."""
    own, theirs = generators(seed)
    loops.skip(own, words)
    theirs.random(words)
    assert same_state(own, theirs)


def test_streams_carry_counters_over(placed):
    """Where a counter is at the end of its first word, numbers are drawn on the host."""
    pair = [own_generator(Context()) for _ in "01"]
    for random in pair:
        random.bit_generator.advance(2**64 - 40)
    x = np.random.default_rng(0).standard_normal(1500).astype(np.float32)
    codec, tensor = codecs.uniform_dithering(7), on_device(x)
    code = np.empty(codec.size(x.size, FLOAT32), np.uint8)
    assert placed(codec, tensor).put(tensor, pair[0], code)
    np.testing.assert_array_equal(code, codec._to_bytes(x, pair[1]))


@pytest.mark.parametrize("codec", [codecs.logarithmic(), codecs.uniform_dithering(200)], ids=repr)
def test_places_of_codecs_without_loops_are_on_the_host(placed, codec):
    assert placed(codec, torch.zeros(5, device=DEVICE)) is None


def test_places_are_for_float32_that_is_not_empty(placed):
    assert placed(codecs.natural(), torch.zeros(5, dtype=torch.float64, device=DEVICE)) is None
    assert placed(codecs.natural(), torch.zeros(0, device=DEVICE)) is None


@pytest.mark.parametrize("kind", ["normal", "special"])
@pytest.mark.parametrize("codec", [CODECS[0], CODECS[1], codecs.ternary()], ids=repr)
def test_frames_are_those_of_the_host(placed, codec, kind):
    x = drawn(np.random.default_rng(3), 500, kind, FLOAT32)
    tensor = on_device(x)
    coder = placed(codec, tensor)
    frame, sent = encode_sent(coder, tensor, own_generator(Context()))
    expected, theirs = encode_sent(codec, x, own_generator(Context()))
    np.testing.assert_array_equal(frame, expected)
    assert_same(sent, theirs)
    _, values = decode_coded(coder, frame, 500, FLOAT32)
    assert_same(values, theirs)


METHODS = [
    SignSGD(),
    EFSignSGD(),
    QSGD(levels=7),
    TernGrad(),
    NaturalCompression(),
    FP8(),
    OneBit(),
]


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_exchanges_are_those_of_the_host(placed, monkeypatch, method):
    """Of two ranks over three steps, one of them with a NaN on one rank; frames, averages, what was
    sent and states."""
    if INTERPRETED:  # else the device says so
        monkeypatch.setattr(backend, "loops", lambda x: "hvd_compress.torch.triton_loops")
    used = []
    from hvd_compress.torch import triton_codecs

    put = triton_codecs.Placed.put
    monkeypatch.setattr(triton_codecs.Placed, "put", lambda *a, **b: used.append(1) or put(*a, **b))
    shape, data = (20, 70), np.random.default_rng(0)
    states = {}
    for step in range(3):
        gradients = [data.standard_normal(shape).astype(np.float32) for _ in "ab"]
        gradients[0][0, :3] = 0
        if step == 1:
            gradients[1][3, 3] = np.nan
        found = {}
        for place in ("host", "device"):
            arrays = gradients
            if place == "device":
                arrays = [torch.tensor(g, device=DEVICE) for g in gradients]
            if step == 0:
                states[place] = [method.init(g) for g in arrays]
            found[place] = run(
                [
                    method.exchange(
                        g, copy.copy(s), Context("w", rank=r, size=2, step=step, shape=shape)
                    )
                    for r, (g, s) in enumerate(zip(arrays, states[place], strict=True))
                ]
            )
            states[place] = [outcome.state for outcome in found[place]]
        for own, expected in zip(found["device"], found["host"], strict=True):
            assert own.mean.device.type == DEVICE.type
            assert_same(own.mean, expected.mean)
            assert_same(own.sent, expected.sent)
            assert own.state.keys() == expected.state.keys()
            for key, value in expected.state.items():
                assert_same(own.state[key], value)
    assert len(used) >= 6


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_waits_are_one_for_a_code(placed, codec):
    """When it comes to the host.  Tables are made once."""
    from hvd_compress.torch import triton_code_loops

    n = 1030 if INTERPRETED and FEW else 3000
    x = on_device(np.random.default_rng(0).standard_normal(n).astype(np.float32))
    coder, sent = placed(codec, x), torch.zeros_like(x)
    code = np.empty(codec.size(n, FLOAT32), np.uint8)
    coder.put(x, own_generator(Context()), code, sent)  # which makes tables
    tables = triton_code_loops._kept.cache_info().currsize
    assert waits_of(lambda: coder.put(x, own_generator(Context()), code, sent)) == 1
    assert waits_of(lambda: coder.decode_to(code, sent, add=True)) == 0
    assert triton_code_loops._kept.cache_info().currsize == tables


_F, _D, _I, _B = "*fp32", "*fp64", "*i32", "*u8"
_SUMS = [_D, _D, _D, "i32", "i32", "i32", "i32"]
_QUANTISE = [_F, _F, _F, _F, "*i64", _B, _I, "i32", "i32", "i32"]
_DIGITS = [_B, _F, _F, "*i64", _F, "i32", "i32", "i32", "i32", "fp32"]
#: a kernel with the types of its arguments and its constants, in their order
KERNELS = [
    *(("sums", [_F, *_SUMS[1:]], [term, 8]) for term in range(7)),
    ("sums", _SUMS, [0, 8]),
    ("largest", [_F, _I, "i32", "i32", "i32", "i32"], [8]),
    *(("of_sums", [_D, _F, "i32", "i32", "i64"], [kind, 1024]) for kind in range(1, 4)),
    ("of_sums", [_D, _D, "i32", "i32", "i64"], [0, 1024]),
    *(
        ("of_largest", [_I, _F, _F, "i32", "fp32"], [kind, kind == 3, 1024])
        for kind in (0, 1, 3, 4)
    ),
    ("two_means", [_D, _D, _D, _F, "i32", "i32", "i32"], [1024]),
    *(("quantise", _QUANTISE, [kind, 2, kind == 3, 3, 7, 1024]) for kind in range(5)),
    ("quantise", [*_QUANTISE[:4], _F, *_QUANTISE[5:]], [1, 1, False, 0, 0, 1024]),
    ("exponents", [_F, _F, _B, _I, "i32"], [0, 1024]),
    ("exponents", [_F, "*i64", _B, _I, "i32"], [2, 1024]),
    *(("pack_fields", [_B, _B, "i32", "i32"], [bits, 1024]) for bits in (2, 3, 7)),
    ("pack_words", [_B, _B, "i32", "i32"], [3, 40, 1024]),
    *(("signs", [_F, _B, _I, "i32"], [sign, sign == 2, 1024]) for sign in range(3)),
    ("count_zeros", [_F, _I, "i32"], [1024]),
    ("draw_zeros", [_F, "*i64", "*i64", _B, _I, "i32"], [1024]),
    ("from_digits", _DIGITS, [255, 8, 0, False, True, 1024]),
    ("from_digits", _DIGITS, [3, 0, 40, True, False, 1024]),
    ("from_bits", [_B, _F, _F, "i32", "i32"], [True, True, True, 1024]),
    ("from_bits", [_B, _F, _F, "i32", "i32"], [False, False, False, 1024]),
    ("from_natural", [_B, _B, _F, "i32"], [True, 1024]),
]


@pytest.mark.skipif(INTERPRETED, reason="compiles nothing")
@pytest.mark.parametrize(("name", "types", "constants"), KERNELS, ids=str)
def test_kernels_compile_for_gpus_and_round_as_numpy_does(name, types, constants, tmp_path):
    """No product and sum are contracted, quotients and roots are rounded correctly, and small
    numbers are kept; no GPU is needed."""
    from hvd_compress.torch import triton_codec_kernels, triton_sum_kernels

    kernel = getattr(triton_codec_kernels, name, None) or getattr(triton_sum_kernels, name)
    signature = [*types, *["constexpr"] * len(constants)]
    for code in compiled_for_gpus(kernel, signature, [None] * len(types) + constants, tmp_path):
        for inexact in ("fma", "div.full", "approx", ".ftz"):
            assert inexact not in code
