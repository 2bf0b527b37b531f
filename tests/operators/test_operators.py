"""Selection against plain sorting, random selection against statistics, rounding against torch."""

import math

import numpy as np
import pytest
import tensorflow as tf
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hvd_compress import (
    ConfigError,
    Context,
    Gather,
    PayloadError,
    RandomK,
    Sum,
    TopK,
)
from hvd_compress.backends import backend_of
from hvd_compress.backends import numpy as numpy_backend
from hvd_compress.blocks import gather_drawn, random_k, top_k
from hvd_compress.codecs.at_random import own_generator, shared_generator
from hvd_compress.codecs.top_k import _SMALL
from hvd_compress.codecs.top_k import count as top_k_count
from hvd_compress.engines.lockstep import World
from hvd_compress.wire import encode_dense

N = _SMALL + 4099  # large enough for the sampled search

RANDOM = np.random.default_rng(7)
NORMAL = RANDOM.normal(size=N).astype(np.float32)
ARRAYS = {
    "normal": NORMAL,
    "heavy-tails": RANDOM.standard_cauchy(N).astype(np.float32),
    "laplace": RANDOM.laplace(size=N).astype(np.float32),
    "wide-range": (10.0 ** RANDOM.uniform(-30, 30, N)).astype(np.float32),
    "subnormal": (RANDOM.integers(-9, 9, N) * 1e-45).astype(np.float32),
    "heavy-ties": RANDOM.integers(-3, 4, N).astype(np.float32),
    "two-values": np.where(RANDOM.random(N) < 0.001, 2, -1).astype(np.float32),
    "zeros": np.zeros(N, np.float32),
    "equal": np.full(N, -2.5, np.float32),
    "few-nonzeros": np.where(RANDOM.random(N) < 3e-4, NORMAL, 0).astype(np.float32),
    "one-nonzero": np.eye(1, N, N - 1, dtype=np.float32)[0],
    "ascending": np.sort(NORMAL),
    "descending": np.sort(NORMAL)[::-1],
    "magnitudes-ascending": NORMAL[np.argsort(np.abs(NORMAL))],
    "signed-zeros": np.where(RANDOM.random(N) < 0.5, 0.0, -0.0).astype(np.float32),
    "float64": RANDOM.normal(size=N),
}
# Peaks at every p-th element: a sample with that stride sees peaks only, or none.
ARRAYS |= {
    f"period-{p}": np.where(np.arange(N) % p == phase, 100, NORMAL).astype(np.float32)
    for p, phase in ((2, 0), (97, 0), (99, 0), (99, 5), (100, 1), (101, 0))
}


def by_sorting(x, k):
    """The k largest magnitudes; a stable sort leaves ties in order of their index."""
    return np.sort(np.argsort(-np.abs(x), kind="stable")[:k])


def frameworks(x):
    x = np.ascontiguousarray(x)
    return x, torch.from_numpy(x.copy()), tf.convert_to_tensor(x)


def selected(array, k):
    indices = top_k().select(array, k, Context())
    return backend_of(array).to_numpy(indices).tolist()


@pytest.mark.parametrize("density", [1e-6, 0.001, 0.01, 0.3, 0.9999, 1.0])
@pytest.mark.parametrize("name", ARRAYS)
def test_the_sampled_search_finds_the_largest_in_all_frameworks(name, density):
    x = ARRAYS[name]
    k = top_k_count(N, density)
    expected = by_sorting(x, k)
    *two, in_tensorflow = frameworks(x)
    if name != "subnormal":  # these are zeros to TensorFlow
        assert selected(in_tensorflow, k) == expected.tolist()
    for array in two:
        for step in (0, 1, 5):
            indices = top_k(density).select(array, k, Context(step=step))
            np.testing.assert_array_equal(backend_of(array).to_numpy(indices), expected)
            assert backend_of(array).dtype(indices) == "int64"


@settings(max_examples=100)
@given(
    x=hnp.arrays(
        np.float32,
        st.integers(1, 60),
        elements=st.one_of(
            st.integers(-3, 3).map(float), st.floats(-9, 9, width=32, allow_subnormal=False)
        ),
    ),
    data=st.data(),
)
def test_selection_from_small_arrays(x, data):
    k = data.draw(st.integers(0, x.size))
    for array in frameworks(x):
        assert selected(array, k) == by_sorting(x, k).tolist()


def test_ties_go_to_the_lower_index():
    x = np.array([1, -2, 2, 0, -2, 1], np.float32)
    for array in frameworks(x):
        for k, expected in ((1, [1]), (2, [1, 2]), (3, [1, 2, 4]), (4, [0, 1, 2, 4])):
            assert selected(array, k) == expected


@pytest.mark.parametrize("n", [10, N])
def test_an_array_of_nan_still_gives_k_indices(n):
    for array in frameworks(np.full(n, np.nan, np.float32)):
        assert selected(array, 3) == [0, 1, 2]


@pytest.mark.parametrize(
    ("n", "density", "k"),
    [(0, 0.5, 0), (1, 1e-9, 1), (3000, 0.001, 3), (3001, 0.001, 4), (100, 0.07, 7), (7, 1.0, 7)],
)
def test_count(n, density, k):
    assert top_k(density).count(n, Context()) == k
    assert random_k(density).count(n, Context()) == k


@given(n=st.integers(0, 10**10), density=st.floats(1e-6, 1))
def test_count_is_the_fraction_rounded_up(n, density):
    k = top_k_count(n, density)
    assert 0 <= k <= n
    assert (k > 0) == (n > 0)
    assert k - 1 < n * density + 1e-6
    assert k >= n * density * (1 - 1e-12) - 1e-6


# random_k


def draw(context=None, n=1000, k=100):
    return random_k().select(np.zeros(n, np.float32), k, context or Context())


def test_random_indices_are_shared_and_fresh():
    here = draw(Context("a", rank=0, size=4, step=3, seed=1))
    there = draw(Context("a", rank=3, size=4, step=3, seed=1))
    assert np.array_equal(here, there)
    others = {
        "step": Context("a", step=4, seed=1),
        "name": Context("b", step=3, seed=1),
        "seed": Context("a", step=3, seed=2),
        # keys that would clash if the parts were only written one after the other
        "shifted": Context("3/a", step=1, seed=1),
    }
    for changed, context in others.items():
        assert not np.array_equal(here, draw(context)), changed


@given(n=st.integers(0, 30000), data=st.data(), step=st.integers(0, 2**40))
def test_random_indices_are_ascending_and_unique_in_all_frameworks(n, data, step):
    k = data.draw(st.integers(0, n) if n < 100 else st.sampled_from((1, n // 100, n // 2, n)))
    indices = draw(Context(step=step), n, k)
    assert indices.dtype == np.int64
    assert indices.size == k
    assert (np.diff(indices) > 0).all()
    assert k == 0 or (indices[0] >= 0 and indices[-1] < n)
    in_torch = random_k().select(torch.zeros(n), k, Context(step=step))
    assert in_torch.dtype == torch.int64
    assert np.array_equal(in_torch.numpy(), indices)


@pytest.mark.parametrize(("n", "k"), [(50, 5), (50, 25), (20000, 20)])
def test_random_indices_are_uniform(n, k):
    draws, bins = 2000, 50
    hits = np.zeros(bins)
    for step in range(draws):
        np.add.at(hits, draw(Context(step=step), n, k) * bins // n, 1)
    expected = draws * k / bins
    chi_square = ((hits - expected) ** 2 / expected).sum()
    # Sampling without replacement spreads more evenly than 49 degrees of freedom would.
    assert chi_square < 49 + 4 * math.sqrt(2 * 49)
    assert chi_square > (49 - 4 * math.sqrt(2 * 49)) * (1 - k / n)


def test_random_numbers_are_the_documented_ones():
    """Philox keyed by BLAKE2b: other versions of this package must draw the same."""
    assert shared_generator(Context()).integers(0, 1000, 4).tolist() == [767, 720, 946, 567]
    assert draw(n=1000, k=5).tolist() == [483, 566, 718, 764, 944]


def test_unbiased_random_k_has_the_textbook_variance():
    """E C(x) = x and E |C(x) - x|^2 = (d/k - 1) |x|^2 exactly; x = (3, -4, 12), k = 1: 338."""
    x = np.array([3, -4, 12], np.float32)
    world = World(RandomK(density=1 / 3, error_feedback=False), 1)
    by_index = {}
    for _ in range(60):
        outcome = world.exchange([x])[0]
        by_index[int(outcome.sent.indices[0])] = outcome.mean.astype(float)
        assert outcome.state == {}
    assert sorted(by_index) == [0, 1, 2]  # all outcomes, equally likely
    values = np.array(list(by_index.values()))
    np.testing.assert_allclose(values.mean(axis=0), x, rtol=1e-6)
    assert ((values - x) ** 2).sum(axis=1).mean() == pytest.approx(338)


# random_k, drawn by every rank for itself


def test_ranks_that_draw_for_themselves_agree_on_the_average():
    """By hand: every rank's elements are where the documented generator says, in any framework."""
    x = [np.arange(1, 101, dtype=np.float32) + rank for rank in range(3)]
    world = World(RandomK(density=0.05, shared=False), 3, seed=7)
    for step in range(3):
        outcomes = world.exchange(x)
        expected = np.zeros(100)
        for rank, outcome in enumerate(outcomes):
            random = own_generator(Context(rank=rank, step=step, seed=7))
            at = np.sort(random.choice(100, 5, replace=False, shuffle=False))
            assert outcome.sent.indices.tolist() == at.tolist()
            expected[at] += outcome.sent.values
        for outcome in outcomes:
            np.testing.assert_allclose(outcome.mean, expected / 3, rtol=1e-6)
        chosen = [tuple(outcome.sent.indices) for outcome in outcomes]
        assert len(set(chosen)) == 3, "ranks draw for themselves"


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("shared", [True, False])
def test_variance_of_the_average_over_ranks(ranks, shared):
    """E|C(x)|^2 = d/k |x|^2 on a rank.  The average of N equal gradients has the error of one where
    all ranks draw alike, and an N-th of it where each draws for itself (Beznosikov et al.)."""
    d, k, steps = 24, 6, 4000
    x = np.random.default_rng(3).normal(size=d)
    method = RandomK(density=k / d, error_feedback=False, shared=shared)
    world = World(method, ranks)
    means, sizes = [], []
    for _ in range(steps):
        outcome = world.exchange([x] * ranks)[0]
        means.append(outcome.mean)
        sizes.append((outcome.sent.values**2).sum())
    energy = (x**2).sum()
    assert np.mean(sizes) == pytest.approx(d / k * energy, rel=0.05)
    assert method.blocks.via.classes(d).zeta == d / k
    errors = ((np.array(means) - x) ** 2).sum(1)
    expected = (d / k - 1) * energy / (1 if shared else ranks)
    assert errors.mean() == pytest.approx(expected, rel=0.05)
    np.testing.assert_allclose(np.mean(means, 0), x, atol=5 * np.abs(x).max() * (4 / steps) ** 0.5)


@pytest.mark.parametrize(("wire", "item"), [(None, 4), ("float16", 2)])
def test_bytes_of_own_draws_are_values_alone(wire, item):
    x = np.ones(1000, np.float32)
    exchange = RandomK(density=0.1, shared=False, wire=wire).exchange(
        x, {"residual": np.zeros(1000, np.float32)}, Context(size=4)
    )
    request = next(exchange)
    assert isinstance(request, Gather)
    assert request.equal_sizes
    assert request.payload.size == 16 + 100 * item


def test_many_ranks_draw_for_themselves_in_a_dense_sum():
    x = np.ones(50, np.float32)
    exchange = RandomK(density=0.5, shared=False).exchange(
        x, {"residual": np.zeros(50, np.float32)}, Context(size=5)
    )
    request = next(exchange)
    assert isinstance(request, Sum)
    assert np.count_nonzero(request.array) == 25


def test_values_of_own_draws_must_be_as_many_as_were_drawn():
    exchange = RandomK(density=0.1, error_feedback=False, shared=False).exchange(
        np.ones(100, np.float32), {}, Context(size=2)
    )
    own = next(exchange).payload
    with pytest.raises(PayloadError, match="rank 1"):
        exchange.send([own, encode_dense(np.ones(9, np.float32))])


def test_mistakes_with_own_draws():
    with pytest.raises(ConfigError, match="wire"):
        RandomK(shared=False, wire="bfloat16")
    with pytest.raises(TypeError, match="random_k"):
        gather_drawn(top_k(0.1))


# Rounding to the types on the wire


def edge_cases(dtype=np.float32):
    """Every float32 whose upper half is interesting, with all kinds of lower halves."""
    upper = np.arange(0, 2**16, 3, dtype=np.uint32)
    upper = np.union1d(upper, [0x0000, 0x0001, 0x007F, 0x0080, 0x7F7F, 0x7F80, 0xFF7F, 0xFF80])
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    x = ((upper[:, None] << 16).astype(np.uint32) | lower).reshape(-1).view(np.float32)
    with np.errstate(invalid="ignore"):  # some are signalling NaNs
        return x.astype(dtype)


def assert_same_bits(a, b):
    assert a.dtype == b.dtype
    nan = np.isnan(a)
    np.testing.assert_array_equal(nan, np.isnan(b))
    bits = np.uint32 if a.dtype == np.float32 else np.uint64
    np.testing.assert_array_equal(a.view(bits)[~nan], b.view(bits)[~nan])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rounding_to_bfloat16_is_torchs_to_the_bit(dtype):
    x = edge_cases(dtype)
    in_torch = torch.from_numpy(x).bfloat16().to(torch.from_numpy(x).dtype)
    assert_same_bits(numpy_backend.round_to(x, "bfloat16"), in_torch.numpy())


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("wire", ["float16", "float32", None])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rounding_is_torchs(dtype, wire, saturate):
    x = edge_cases(dtype)
    ours = numpy_backend.round_to(x, wire, saturate)
    theirs = backend_of(torch.zeros(1)).round_to(torch.from_numpy(x), wire, saturate)
    assert_same_bits(ours, theirs.numpy())


def test_float16_saturates_where_asked():
    x = np.array([65504, 65519, 65520, 1e30, -1e30, np.inf, 2**-24, 2**-25, 2**-25 * 1.01])
    for array in frameworks(x.astype(np.float32)):
        xp = backend_of(array)
        saturated = [65504, 65504, 65504, 65504, -65504, 65504, 2**-24, 0, 2**-24]
        rounded = xp.round_to(array, "float16", saturate=True)
        assert xp.to_numpy(rounded).tolist() == saturated
        infinite = [65504, 65504, math.inf, math.inf, -math.inf, math.inf, 2**-24, 0, 2**-24]
        assert xp.to_numpy(xp.round_to(array, "float16")).tolist() == infinite
        assert np.isnan(xp.to_numpy(xp.round_to(array * math.nan, "float16", saturate=True))).all()


def test_error_feedback_keeps_what_float16_values_cannot_carry():
    world = World(TopK(density=0.1, values="float16"), 2)
    gradients = [np.array([1e5] + [0.0] * 99, np.float32), np.zeros(100, np.float32)]
    first = world.exchange(gradients)
    assert first[0].mean[0] == 65504 / 2
    assert first[0].state["residual"][0] == 1e5 - 65504
    second = world.exchange([np.zeros(100, np.float32)] * 2)
    assert second[1].mean[0] == (1e5 - 65504) / 2
    assert not second[0].state["residual"].any()


def test_without_error_feedback_what_is_not_sent_is_lost():
    world = World(TopK(density=0.5, error_feedback=False), 1)
    outcome = world.exchange([np.array([3.0, 1.0])])[0]
    assert (outcome.mean.tolist(), outcome.state) == ([3.0, 0.0], {})
    assert world.exchange([np.zeros(2)])[0].mean.tolist() == [0.0, 0.0]
