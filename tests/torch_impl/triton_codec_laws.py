"""Codecs in Triton against their definitions in NumPy, bit for bit; see triton_laws.py."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvd_compress import (
    FP8,
    QSGD,
    Context,
    EFSignSGD,
    LinearQuantization,
    NaturalCompression,
    NaturalDithering,
    OneBit,
    TernGrad,
    codecs,
)
from hvd_compress.chain import Chain
from hvd_compress.codecs.at_random import own_generator
from hvd_compress.engines.local import LocalEngine
from hvd_compress.engines.lockstep import World
from hvd_compress.errors import PayloadError
from hvd_compress.fused import coded_plan
from hvd_compress.kernels import reference
from hvd_compress.meetings import allgather, alltoall
from hvd_compress.reduce import Reducer
from hvd_compress.transforms import (
    averaged_momentum,
    ef21,
    error_feedback,
    momentum_after_averaging,
    smoothing,
)
from tests.kernels.buckets import (
    Ranks,
    assert_all_equal,
    gradients_of,
    made,
    one_by_one,
    two_of_three,
)
from tests.kernels.test_codecs import CODECS as COMPILED
from tests.kernels.test_codecs import KINDS, drawn, generators
from tests.torch_impl.triton_laws import (
    DEVICE,
    FEW,
    INTERPRETED,
    assert_same,
    at_device,
    drawn_too,
    moved_to_host,
    on_device,
    waits_of,
)

FLOAT32 = np.dtype("float32")
#: with other numbers of bits and levels than these the kernels are the same
OTHERS = [
    *(codecs.linear(bits, 100) for bits in (3, 4, 6, 7)),
    *(codecs.uniform_dithering(levels, 512, "max") for levels in (4, 15)),
    *(codecs.uniform_dithering(127, 2000, "l2"), codecs.natural_dithering(4, 3, "max")),
]
CODECS = [codec for codec in COMPILED if codec not in OTHERS]
SIZES = st.one_of(st.integers(1, 300), st.sampled_from([1023, 1024, 4096, 4097, 10_000]))

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


class Coder:
    """A codec whose codes and numbers are on the device."""

    def __init__(self, codec, n):
        from hvd_compress.torch.triton.codecs import Codes

        size = codec.size(n, FLOAT32)
        self.codes = Codes([codec], [slice(0, n)], torch.empty(0, device=DEVICE), [0])
        self.code = torch.full((size + -size % 4,), 7, dtype=torch.uint8, device=DEVICE)[:size]
        self.whole = self.code.as_strided((size + -size % 4,), (1,))

    def encode(self, x, random):
        """Return whether all was finite."""
        return not self.codes.encode(x, [random], self.whole)[0]

    def read(self, out, *how):
        self.codes.read(self.whole, out, *how)


#: two kinds of each codec, so that those with the same kernels have all, and some have many blocks
IN_TURN = [
    (codec, (300, 1, 1025, 33, 4097)[number % 5], KINDS[number % 8], number % 6)
    for number, codec in enumerate(codec for codec in CODECS for _ in range(2))
]


@pytest.mark.parametrize(("codec", "n", "kind", "offset"), IN_TURN, ids=repr)
def test_codes_are_those_of_numpy(codec, n, kind, offset):
    assert_codes(codec, n, kind, offset, 0)


@pytest.mark.skipif(INTERPRETED and FEW, reason="takes long in the interpreter")
@pytest.mark.parametrize("codec", CODECS, ids=repr)
@settings(max_examples=5, deadline=None)
@given(
    n=SIZES,
    kind=st.sampled_from(KINDS),
    offset=st.integers(0, 5),
    seed=st.integers(0, 1000),
)
def test_drawn_codes_are_those_of_numpy(codec, n, kind, offset, seed):
    assert_codes(codec, n, kind, offset, seed)


def assert_codes(codec, n, kind, offset, seed):
    assert codec._loops is not None
    data = np.random.default_rng(seed)
    values = drawn(data, n, kind, FLOAT32)
    x = on_device(values, offset)
    coder = Coder(codec, n)
    own, theirs = generators(seed)
    assert coder.encode(x, own) is bool(np.isfinite(values).all())
    if not np.isfinite(values).all():
        return
    with np.errstate(all="ignore"):
        expected = codec.encode(values, theirs)
        decoded = codec.decode(expected, n, FLOAT32)
    np.testing.assert_array_equal(coder.code.cpu(), expected)
    assert_same(x, values)
    sent, total = torch.zeros(n, device=DEVICE), drawn(data, n, "normal", FLOAT32)
    coder.read(sent)
    assert_same(sent, decoded)
    for how, expected in ((coder.codes.ADD, np.add), (coder.codes.TAKE_OFF, np.subtract)):
        out = on_device(total, offset)
        coder.read(out, how)
        with np.errstate(all="ignore"):
            assert_same(out, expected(total, decoded))


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@drawn_too(3)
@given(n=SIZES, seed=st.integers(0, 1000))
@example(300, 0)
def test_damaged_bytes_are_decoded_as_by_numpy(codec, n, seed):
    code = np.random.default_rng(seed).integers(0, 256, codec.size(n, FLOAT32), np.uint8)
    with np.errstate(all="ignore"):
        expected = codec.decode(code, n, FLOAT32)
    out = torch.zeros(n, device=DEVICE)
    coder = Coder(codec, n)
    coder.code.copy_(torch.from_numpy(code))
    coder.read(out)
    assert_same(out, expected)


@pytest.mark.parametrize("n", [1, 17, 4096, 9001])
@pytest.mark.parametrize("length", [5, 4096, 5000, None])
def test_orders_of_sums_are_those_of_numpy(n, length):
    """More elements than are added up in one go, and in runs of which the last one is short."""
    from hvd_compress.torch.triton import sum_kernels, sums
    from hvd_compress.torch.triton.tasks import Layout, Span

    numbers = drawn(np.random.default_rng(n), n + 3, "wide", FLOAT32)
    length, x = length or n, on_device(numbers)
    # Of two tasks, one of which begins within the other.
    layout = Layout([Span(0, n, length, 1, 0), Span(3, n + 3, length, 1, 0)], x, [0, 0])
    found = sums.sums(x, layout, sum_kernels.SQUARE).cpu().numpy()
    runs = [
        np.square(task[i : i + length], dtype=np.float64)
        for task in (numbers[:n], numbers[3:])
        for i in range(0, n, length)
    ]
    np.testing.assert_array_equal(found, [reference.sums(run.reshape(1, -1))[0] for run in runs])


@pytest.mark.parametrize(
    ("codec", "n"),
    [(codecs.logarithmic(), 5), (codecs.uniform_dithering(200), 5), (codecs.natural(), 0)],
    ids=repr,
)
def test_codes_that_are_not_taken(codec, n):
    from hvd_compress.torch.triton.codecs import Codes

    assert not Codes.takes(codec, n)


BUCKETS = [
    OneBit(),
    OneBit(column=40, via="allgather"),
    EFSignSGD(),
    EFSignSGD(via="allgather"),
    FP8(),
    LinearQuantization(bits=6),
    QSGD(),
    TernGrad(),
    TernGrad(clip=2.5),
    Chain((), via=allgather(codecs.sign())),
    NaturalCompression(),
    NaturalDithering(),
    Chain((), via=alltoall(codecs.natural())),
    Chain((error_feedback(),), via=alltoall(codecs.uniform_dithering(7, 64))),
    Chain((averaged_momentum(0.5, start=1), error_feedback()), via=alltoall(codecs.scaled_sign())),
    Chain((momentum_after_averaging(), smoothing(0.8), ef21()), via=allgather(codecs.natural())),
]
#: one of which some ranks own nothing
SHAPES = {"a": (20, 10), "b": (8, 8), "c": (2,), "d": (41, 27)}
SOME = BUCKETS if not (INTERPRETED and FEW) else [BUCKETS[i] for i in (1, 2, 5, 8, 9, 12, 14, 15)]


def assert_bucket(found, expected, gradients=None):
    assert_all_equal(moved_to_host(found), expected)
    for rank, own in enumerate(found):
        for name, outcome in own.items():
            assert outcome.mean.device.type == DEVICE.type
            if gradients is not None:
                assert outcome.mean.data_ptr() == gradients[rank][name].data_ptr()


@pytest.mark.parametrize("method", SOME, ids=repr)
def test_buckets_are_what_their_tensors_are(by_triton, method):
    """The whole exchange, against the blocks of the chain in NumPy, over steps with a NaN, and with
    numbers so large that what is left of them is not finite.  Messages stay on the device, or go by
    the host."""
    ranks, expected = Ranks(method, SHAPES, 3, in_place=True), one_by_one(method, 3)
    ranks.reads_device = BUCKETS.index(method) % 2 == 0
    random = np.random.default_rng(1)
    for step in range(3):
        gradients = gradients_of(random, SHAPES, 3)
        if step == 1:
            gradients[1]["b"][3, 3] = np.nan
            for own in gradients:
                own["a"][:2] = 3e38
        ours = made(gradients, at_device)
        assert_bucket(ranks.exchange(ours), expected(gradients), ours)


@pytest.mark.parametrize("method", [BUCKETS[4], BUCKETS[10]], ids=repr)
def test_buckets_leave_gradients_alone_that_are_not_theirs(by_triton, method):
    ranks, expected = Ranks(method, SHAPES, 2), one_by_one(method, 2)
    gradients = gradients_of(np.random.default_rng(2), SHAPES, 2)
    ours = made(gradients, at_device)
    assert_bucket(ranks.exchange(ours), expected(copy.deepcopy(gradients)))
    for own, other in zip(ours, gradients, strict=True):
        for name, x in other.items():
            assert_same(own[name], x)


@pytest.mark.parametrize("method", [BUCKETS[0], BUCKETS[4]], ids=repr)
def test_buckets_lose_nothing_after_another_number_of_ranks(by_triton, method):
    """The residual of shards that are others' now goes along with its next message; also if
    that is not finite."""
    random = np.random.default_rng(0)
    fewer, blocks = two_of_three(method, SHAPES, random, at_device, in_place=True)
    fewer.reads_device = method == BUCKETS[0]
    for step in range(3):
        gradients = gradients_of(random, SHAPES, 2)
        if step == 0:
            gradients[0]["a"][0, 0] = np.inf
        expected = blocks.exchange_all(copy.deepcopy(gradients), momentum=0.9)
        assert_bucket(fewer.exchange(made(gradients, at_device)), expected)


@pytest.mark.parametrize("method", [BUCKETS[0], BUCKETS[4]], ids=repr)
def test_buckets_of_which_a_rank_owns_nothing(by_triton, method):
    """Also if what is not finite is on that rank."""
    shapes, random = {"a": (2,), "b": ()}, np.random.default_rng(6)
    ranks, expected = Ranks(method, shapes, 3, in_place=True), one_by_one(method, 3)
    ranks.reads_device = method == BUCKETS[4]
    for step in range(3):
        gradients = gradients_of(random, shapes, 3)
        if step == 1:
            gradients[2]["a"][0] = np.nan
        assert_bucket(ranks.exchange(made(gradients, at_device)), expected(gradients))


@pytest.mark.parametrize("method", [BUCKETS[i] for i in (0, 3, 6)], ids=repr)
def test_buckets_are_the_same_with_a_device_and_without(by_triton, method):
    """The messages of ranks of which one has none."""
    ranks, expected = Ranks(method, SHAPES, 2, in_place=True), one_by_one(method, 2)
    random = np.random.default_rng(5)
    for _ in range(2):
        gradients = gradients_of(random, SHAPES, 2)
        ours = [*made(gradients[:1], at_device), *made(gradients[1:], torch.tensor)]
        by_triton.clear()
        by_triton.update(x.data_ptr() for x in ours[1].values())
        assert_all_equal(moved_to_host(ranks.exchange(ours)), expected(gradients))


@pytest.mark.parametrize(
    ("method", "passed"), [*((BUCKETS[0], n) for n in (0, 2, 4, 6)), (BUCKETS[3], 0)], ids=repr
)
def test_buckets_of_a_step_that_fails_keep_their_states(by_triton, monkeypatch, method, passed):
    """Whichever message arrives damaged, of two that each rank opens in a turn; and the next step
    is as if it had not been, where no rank was through with it."""
    ranks, expected = Ranks(method, SHAPES, 2, in_place=True), one_by_one(method, 2)
    random = np.random.default_rng(4)
    for step in range(3):
        gradients = gradients_of(random, SHAPES, 2)
        ours = made(gradients, at_device)
        if step == 1:
            before, opened = copy.deepcopy(ranks.states), coded_plan.opened
            left = [passed]

            def damaged(frame, *args, left=left, opened=opened, **options):
                left[0] -= 1
                return opened(frame[:-8] if left[0] < 0 else frame, *args, **options)

            with monkeypatch.context() as patch:
                patch.setattr(coded_plan, "opened", damaged)
                with pytest.raises(PayloadError):
                    ranks.exchange(ours)
            kept = [*zip(ranks.states, before, strict=True)][passed // 6 :]
            for own, other in kept:
                torch.testing.assert_close(own, other, rtol=0, atol=0)
            if passed == 6:  # one is through
                return
        else:
            assert_bucket(ranks.exchange(ours), expected(gradients))


@pytest.mark.parametrize("method", [BUCKETS[0], BUCKETS[3], BUCKETS[6]], ids=repr)
def test_buckets_of_an_optimizer_are_those_of_the_host(by_triton, method):
    """Arrays are taken as they were in the step before."""
    own, other = (Reducer(method, LocalEngine(), in_place=True) for _ in "01")
    random, states = np.random.default_rng(3), {}
    for step in range(5):
        (gradients,) = gradients_of(random, SHAPES, 1)
        if step == 3:
            gradients["d"][0, 0] = np.inf
        (ours,) = made([gradients], at_device)
        found, expected = own.reduce(ours), other.reduce(gradients)
        for name in SHAPES:
            assert_same(found[name], expected[name])
            for key, value in other.store.states[name].items():
                state = own.store.states[name][key]
                assert_same(state, value)
                if name != "d":  # of which an infinite step makes another one
                    assert states.setdefault((name, key), state) is state
    assert own.records == other.records


HALVES = [(BUCKETS[i], x) for i in (0, 3, 4, 6) for x in (torch.float16, torch.bfloat16)]
if INTERPRETED and FEW:  # each method in one of them
    HALVES = [HALVES[i] for i in (0, 3, 4, 7)]


@pytest.mark.parametrize(("method", "dtype"), HALVES, ids=repr)
def test_buckets_of_half_precision_are_what_their_tensors_are(by_triton, method, dtype):
    """Also where an average has no room in it, since it is of residuals, too."""
    ranks, world = Ranks(method, SHAPES, 2, in_place=True), World(method, 2)
    random = np.random.default_rng(7)
    for step in range(3):
        gradients = gradients_of(random, SHAPES, 2)
        if step == 1 and dtype == torch.float16:
            for r, states in enumerate(ranks.states):
                for own in (states["b"], world.states["b"][r]):
                    if "residual" in own:
                        own["residual"][:] = 7e4
        ours = made(gradients, lambda x: at_device(x).to(dtype))
        plain = made(ours, lambda x: x.to("cpu", copy=True))
        expected = world.exchange_all(plain, momentum=0.9)
        for own, theirs in zip(ranks.exchange(ours), expected, strict=True):
            for name, outcome in theirs.items():
                assert own[name].direction.dtype == dtype
                assert_same(own[name].direction.float(), outcome.direction.float().numpy())
                for key, x in outcome.state.items():
                    assert_same(own[name].state[key], x.numpy())


@pytest.mark.parametrize(
    "codec", {x.name: x for x in CODECS}.values() if INTERPRETED and FEW else CODECS, ids=repr
)
def test_the_host_waits_for_no_code(codec):
    """Tables are made once."""
    from hvd_compress.torch.triton.codecs import _kept

    n = 1030 if INTERPRETED and FEW else 3000
    x = on_device(np.random.default_rng(0).standard_normal(n).astype(np.float32))
    coder, sent = Coder(codec, n), torch.zeros_like(x)

    def encode():
        coder.codes.encode(x, [own_generator(Context())], coder.whole)

    encode()  # which makes tables
    coder.read(sent)
    tables = _kept.cache_info().currsize
    assert waits_of(encode) == 0
    assert waits_of(lambda: coder.read(sent, coder.codes.ADD)) == 0
    assert _kept.cache_info().currsize == tables
