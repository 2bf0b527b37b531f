"""Operators and methods that send a part of a tensor, chosen by thresholds: by hand, by their laws,
against sorting, and the bytes that they send."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import tensorflow as tf
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hvd_compress import (
    AdaptiveThreshold,
    ConfigError,
    Context,
    MSTopK,
    ScaleCom,
    SIDCo,
    Threshold,
)
from hvd_compress.backends import backend_of
from hvd_compress.blocks import (
    adaptive_threshold,
    chain,
    error_feedback,
    leader_top_k,
    low_pass_memory,
    ms_top_k,
    plus_minus,
    sidco,
    threshold,
)
from hvd_compress.engines.lockstep import World
from hvd_compress.errors import PayloadError
from hvd_compress.operators.quantiles import (
    FITS,
    inverse_upper_gamma,
    quantile,
    upper_gamma,
)
from hvd_compress.requests import Gather, Sum
from hvd_compress.wire import sparse_size

WORKED = np.array([3, -4, 12], np.float32)
RANDOM = np.random.default_rng(11)
NORMAL = RANDOM.normal(size=20_000).astype(np.float32)

vectors = arrays(
    np.float32,
    st.integers(1, 60),
    elements=st.one_of(st.integers(-3, 3).map(float), st.floats(-9, 9, width=32)),
)


def picks(operator, x, k=None, **context):
    """The same in every framework."""
    x = np.asarray(x)
    found = [
        backend_of(array).to_numpy(operator.select(array, k, Context(**context)))
        for array in (x, torch.from_numpy(x.copy()), tf.constant(x))
    ]
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)
    assert {indices.dtype for indices in found} == {np.dtype("int64")}
    assert (np.diff(found[0]) > 0).all()
    return found[0].tolist()


def payload_of(method, gradient):
    """The first message of a rank."""
    request = next(method.exchange(gradient, method.init(gradient), Context(size=2)))
    assert isinstance(request, Gather)
    return request


# -- a fixed threshold -------------------------------------------------------------------------


def test_threshold_by_hand():
    assert picks(threshold(4), WORKED) == [2]  # 4 itself is not beyond 4
    assert picks(threshold(3.5), WORKED) == [1, 2]
    assert picks(threshold(4), -WORKED) == [2]
    assert picks(threshold(12), WORKED) == []
    assert picks(threshold(4), np.array([1, np.nan, 5, -np.inf], np.float32)) == [1, 2, 3]


def test_signs_times_tau_leave_the_rest():
    outcome = World(Threshold(tau=4, send="sign"), 1).exchange([WORKED])[0]
    assert outcome.mean.tolist() == [0, 0, 4]
    assert outcome.state["residual"].tolist() == [3, -4, 8]


def test_values_leave_nothing():
    outcome = World(Threshold(tau=4), 1).exchange([WORKED])[0]
    assert outcome.mean.tolist() == [0, 0, 12]
    assert outcome.state["residual"].tolist() == [3, -4, 0]


def test_large_elements_are_sent_in_instalments():
    world = World(Threshold(tau=4, send="sign"), 2)
    means = [world.exchange([WORKED, 0 * WORKED])[0].mean.tolist()]
    means += [world.exchange([0 * WORKED] * 2)[0].mean.tolist() for _ in range(2)]
    assert means == [[0, 0, 2], [0, 0, 2], [0, 0, 0]]  # 12 - 4 - 4 is not beyond 4
    # Ranks differ in what they send, and in how many elements that are.
    assert world.exchange([0 * WORKED, -3 * WORKED])[1].mean.tolist() == [-2, 2, -2]


@given(vectors, st.sampled_from((0.25, 1.0, 2.5)))
def test_all_beyond_the_threshold_and_no_others(x, tau):
    chosen = np.isin(np.arange(x.size), threshold(tau).select(x, None, Context()))
    np.testing.assert_array_equal(chosen, np.abs(x) > tau)


def test_bytes_of_threshold():
    x = np.zeros(1000, np.float32)
    x[[3, 500, 700, 701, 999]] = [2, -3, 4, -5, 6]
    for method, body in (
        (Threshold(tau=1, send="sign"), 8 + 1),  # a packed index and a bit a value
        (Threshold(tau=1), 8 + 5 * 4),
        (Threshold(tau=7), 0),
    ):
        request = payload_of(method, x)
        assert request.payload.size == 16 + body + -body % 8
        assert not request.equal_sizes


@pytest.mark.parametrize("send", ["sign", "value"])
def test_no_more_than_dense(send):
    """If all elements are beyond the threshold, or all but some."""
    for x in (NORMAL + 10, np.where(np.arange(NORMAL.size) % 10, NORMAL + 10, 0)):
        method = Threshold(tau=1, send=send)
        assert payload_of(method, x).payload.size <= 16 + NORMAL.nbytes
        outcome, other = World(method, 2).exchange([x, np.zeros_like(x)])
        np.testing.assert_array_equal(outcome.mean, other.mean)
        expected = x / 2 if send == "value" else np.sign(x) / 2
        np.testing.assert_array_equal(outcome.mean, expected)


def test_a_codec_of_one_number():
    code = plus_minus(0.3).encode(WORKED, np.random.default_rng(0))
    assert code.tolist() == [0b101]
    decoded = plus_minus(0.3).decode(code, 3, np.dtype("float32"))
    np.testing.assert_array_equal(decoded, np.float32([0.3, -0.3, 0.3]))


# -- a proportion of each sign -----------------------------------------------------------------


def test_adaptive_threshold_by_hand():
    """Half of three positive elements is two, half of two negative ones is one."""
    x = np.array([1, 5, -2, 0, 3, -7], np.float32)
    assert picks(adaptive_threshold(0.5), x) == [1, 4, 5]
    outcome = World(AdaptiveThreshold(density=0.5), 1).exchange([x])[0]
    assert outcome.mean.tolist() == [0, 4, 0, 0, 4, -7]
    assert outcome.state["residual"].tolist() == [1, 1, -2, 0, -1, 0]


@pytest.mark.parametrize("density", [0.001, 0.01, 0.2])
@pytest.mark.parametrize("positive", [0.5, 0.05])
def test_proportions_of_each_sign(density, positive):
    x = np.where(RANDOM.random(NORMAL.size) < positive, 1, -1) * np.abs(NORMAL)
    for step in range(3):
        chosen = x[picks(adaptive_threshold(density), x.astype(np.float32), step=step)]
        for sign in (1, -1):
            side, there = sign * chosen[sign * chosen > 0], sign * x[sign * x > 0]
            target = math.ceil(density * there.size)
            # One or two elements more are more than a quarter where so few are wanted.
            assert 0.8 * target - 1 <= side.size <= 1.25 * target + 1
            np.testing.assert_array_equal(np.sort(side), np.sort(there)[-side.size :])


@given(vectors)
def test_of_each_sign_something_is_sent(x):
    chosen = x[adaptive_threshold(1e-6).select(x, None, Context())]
    assert set(np.sign(chosen)) == set(np.sign(x[x != 0]))


def test_bytes_of_adaptive_thresholds():
    method, x = AdaptiveThreshold(density=0.01), NORMAL
    k = adaptive_threshold(0.01).select(x, None, Context(size=2)).size
    codes = 2 * 4 + -(-k // 8)  # two means, a bit each
    size = payload_of(method, x).payload.size - 16 - codes
    assert 7.5 < 8 * size / k < 8.7  # packed indices; the entropy is 8.1 bits


# -- exactly k without sorting -----------------------------------------------------------------


def test_ms_top_k_by_hand():
    assert picks(ms_top_k(0.3), np.arange(1.0, 11), 3) == [7, 8, 9]
    assert picks(ms_top_k(0.3), -np.arange(1.0, 11), 3) == [7, 8, 9]
    # More than the elements above the mean.
    assert picks(ms_top_k(0.7), np.arange(1.0, 11), 7) == [3, 4, 5, 6, 7, 8, 9]


def test_ties_are_broken_by_chance_but_repeatably():
    x = np.array([1, 1, 1, 1, 5], np.float32)
    found = [picks(ms_top_k(0.4), x, 2, step=step) for step in range(40)]
    assert all(indices[1:] == [4] for indices in found)
    assert {indices[0] for indices in found} == {0, 1, 2, 3}
    assert found == [picks(ms_top_k(0.4), x, 2, step=step) for step in range(40)]
    other = [picks(ms_top_k(0.4), x, 2, step=step, rank=1) for step in range(40)]
    assert other != found


@given(vectors, st.integers(1, 60), st.integers(0, 3))
def test_the_largest_as_near_as_halving_gets(x, k, step):
    k = min(k, x.size)
    indices = ms_top_k(rounds=60).select(x, k, Context(step=step))
    assert indices.size == k == np.unique(indices).size
    best = np.sort(np.abs(x))[x.size - k :]
    np.testing.assert_allclose(
        np.sort(np.abs(x[indices])), best, rtol=0, atol=2.0**-50 * np.abs(x).max()
    )


def test_few_rounds_find_nearly_the_largest():
    k = 200
    found = np.abs(NORMAL[ms_top_k(rounds=5).select(NORMAL, k, Context())])
    best = np.sort(np.abs(NORMAL))[-k:]
    assert found.size == k
    assert 0.9 * best.sum() < found.sum() < best.sum()


def test_bytes_of_ms_top_k():
    request = payload_of(MSTopK(density=0.01, indices="int32"), NORMAL)
    assert request.equal_sizes
    assert request.payload.size == sparse_size(200, NORMAL.size, "float32") == 16 + 200 * 8
    half = payload_of(MSTopK(density=0.01, values="float16", indices="int32"), NORMAL)
    assert half.payload.size == 16 + 200 * 6


@pytest.mark.parametrize("operator", [ms_top_k(0.25), sidco(0.25), adaptive_threshold(0.25)])
def test_what_is_not_finite_is_picked(operator):
    x = np.array([1, 9, 2, np.nan, 3, -4, 5, 6], np.float32)
    k = operator.count(8, Context())
    assert 3 in picks(operator, x, k)
    assert 3 in picks(operator, np.nan_to_num(x, nan=-np.inf), k)


# -- a fitted quantile -------------------------------------------------------------------------


def test_the_quantile_of_an_exponential_distribution():
    """-ln(0.001) = 6.9078."""
    sizes = -np.log1p(-(np.arange(10**6) + 0.5) / 10**6)
    assert quantile(sizes, 0.001, "exponential") == pytest.approx(6.9078, rel=1e-4)
    assert quantile(sizes, 0.001, "pareto") == pytest.approx(6.9078, rel=1e-3)
    # The closed form of the shape is off by half a percent.
    assert quantile(sizes, 0.001, "gamma") == pytest.approx(6.9078, rel=0.01)


def test_quantiles_of_the_other_distributions():
    random = np.random.default_rng(0)
    heavy = random.pareto(8, 10**6)  # generalised Pareto: survival (1 + x)^-8
    assert quantile(heavy, 0.01, "pareto") == pytest.approx(0.01 ** (-1 / 8) - 1, rel=0.01)
    flat = random.random(10**6)  # the one with k = 1
    assert quantile(flat, 0.01, "pareto") == pytest.approx(0.99, rel=0.005)
    two = random.gamma(2, size=10**6)
    x = quantile(two, 0.01, "gamma")
    assert (1 + x) * math.exp(-x) == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize("fit", FITS)
def test_sizes_without_a_spread(fit):
    assert quantile(np.full(9, 2.0), 0.5, fit) == pytest.approx(2.0, rel=0.4)
    assert picks(sidco(0.1, fit), np.full(50, -2.0)) == list(range(50))


@pytest.mark.parametrize("x", [1e-3, 0.1, 0.7, 1.0, 3.0, 30.0])
def test_the_incomplete_gamma_function(x):
    assert upper_gamma(1, x) == pytest.approx(math.exp(-x), rel=1e-12)
    assert upper_gamma(3, x) == pytest.approx((1 + x + x * x / 2) * math.exp(-x), rel=1e-11)
    assert upper_gamma(0.5, x) == pytest.approx(math.erfc(math.sqrt(x)), rel=1e-11)


def test_the_incomplete_gamma_function_is_scipys():
    special = pytest.importorskip("scipy.special")
    for alpha in (0.01, 0.3, 1.5, 10, 300):
        for x in (1e-8, 0.1, 1, 10, 100, 400):
            theirs = special.gammaincc(alpha, x)
            assert upper_gamma(alpha, x) == pytest.approx(theirs, rel=1e-9, abs=1e-15)
        for ratio in (0.25, 1e-3, 1e-6):
            theirs = special.gammainccinv(alpha, ratio)
            assert inverse_upper_gamma(alpha, ratio) == pytest.approx(theirs, rel=1e-6)


TAILS = {
    "exponential": np.random.default_rng(1).exponential(size=50_000),
    "light": np.random.default_rng(2).normal(size=50_000),
    "heavy": np.random.default_rng(3).standard_t(2, size=50_000),
    "mostly-zero": np.random.default_rng(4).normal(size=50_000) * (np.arange(50_000) % 50 == 0),
}


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("x", TAILS.values(), ids=TAILS)
def test_about_k_are_sent(x, fit):
    indices, state = sidco(0.002, fit).pick(x, None, sidco(0.002, fit).init(x), Context())
    assert 60 < indices.size < 160
    assert indices.size == np.count_nonzero(np.abs(x) >= np.abs(x[indices]).min())
    assert 1 <= state["stages"][0] <= 9  # log2(1 / 0.002)


def test_one_fit_is_far_off_in_a_light_tail():
    """Why there are stages: of a normal distribution it sends next to nothing."""
    x = TAILS["light"]
    assert sidco(0.002, stages=1).select(x, None, Context()).size < 5
    assert 50 < sidco(0.002, stages=4).select(x, None, Context()).size < 150


def test_stages_are_those_that_send_most_nearly_k():
    x, operator = TAILS["light"], sidco(0.002)
    sizes = [sidco(0.002, stages=m).select(x, None, Context()).size for m in range(1, 10)]
    best = 1 + np.argmin(np.abs(np.log(np.array(sizes) / 100)))
    nothing = np.zeros_like(x)
    _, state = operator.pick(nothing, None, operator.init(x), Context())
    assert state["stages"].tolist() == [0, 0]
    indices, state = operator.pick(x, None, state, Context(step=1))
    assert state["stages"].tolist() == [best, sizes[best - 1] / 100]
    assert indices.size == sizes[best - 1]


@pytest.mark.parametrize(("total", "kept"), [(3.9, False), (4.1, True), (5.9, True), (6.1, False)])
def test_stages_are_chosen_again_after_five_steps(total, kept):
    x, operator = TAILS["light"], sidco(0.002)
    for step in range(5, 11):
        old = np.array([2, total], np.float32)
        _, new = operator.pick(x.astype(np.float32), None, {"stages": old}, Context(step=step))
        assert old.tolist() == [2, np.float32(total)]
        assert (new["stages"][0] == 2) == (kept or step % 5 > 0)
        assert new["stages"].dtype == np.float32
    given = {"stages": np.array([2.0, total])}
    assert sidco(0.002, stages=2).pick(x, None, given, Context(step=5))[1]["stages"][0] == 2


def test_a_nonfinite_step_does_not_count():
    world = World(SIDCo(density=0.1), 2)
    world.exchange([NORMAL[:100]] * 2)
    before = [state["stages"].copy() for state in world.states["tensor"]]
    world.exchange([NORMAL[:100], np.full(100, np.nan, np.float32)])
    for old, state in zip(before, world.states["tensor"], strict=True):
        np.testing.assert_array_equal(old, state["stages"])


@given(vectors, st.sampled_from(FITS), st.sampled_from((None, 1, 3)))
def test_something_is_sent_unless_all_is_zero(x, fit, stages):
    indices = sidco(0.01, fit, stages).select(x, None, Context())
    assert (indices.size > 0) == x.any()
    assert x[indices].all()
    if indices.size:
        assert np.abs(x).max() == np.abs(x[indices]).max()


def test_bytes_of_sidco():
    k = sidco(0.01).select(NORMAL, None, Context()).size
    request = payload_of(SIDCo(density=0.01, indices="int32"), NORMAL)
    assert not request.equal_sizes
    assert request.payload.size == 16 + 8 * k
    assert SIDCo().init(NORMAL)["stages"].shape == (2,)


# -- what one rank chooses ---------------------------------------------------------------------


def test_the_leader_chooses_by_hand():
    a, b = np.array([5.0, 1]), np.array([1.0, 4])
    world = World(ScaleCom(density=0.5), 2)
    first = world.exchange([a, b])
    assert first[0].mean.tolist() == [3, 0]
    assert [outcome.state["residual"].tolist() for outcome in first] == [[0, 1], [0, 4]]
    second = world.exchange([a, b])  # a is (5, 2) now, b is (1, 8), and b leads
    assert second[0].mean.tolist() == [0, 5]
    assert [outcome.state["residual"].tolist() for outcome in second] == [[5, 0], [1, 0]]


def test_what_a_low_pass_memory_keeps():
    """memory = 0.75 memory + 0.25 (memory + gradient - sent), by hand."""
    world = World(ScaleCom(density=0.5, beta=0.25), 1)
    outcome = world.exchange([np.array([8.0, 4])])[0]
    assert outcome.mean.tolist() == [8, 0]
    assert outcome.state["memory"].tolist() == [0, 1]
    outcome = world.exchange([np.array([2.0, 4])])[0]
    assert outcome.mean.tolist() == [0, 5]
    assert outcome.state["memory"].tolist() == [0.5, 0.75]


def test_a_low_pass_memory_with_beta_1_is_error_feedback():
    via = leader_top_k(0.1)
    worlds = [World(chain(t, via=via), 2) for t in (low_pass_memory(1), error_feedback())]
    for step in range(5):
        gradients = list(NORMAL[200 * step : 200 * step + 200].reshape(2, 100))
        one, other = (world.exchange(gradients) for world in worlds)
        np.testing.assert_array_equal(one[0].mean, other[0].mean)
        np.testing.assert_array_equal(one[1].state["memory"], other[1].state["residual"])


def test_a_low_pass_memory_of_what_was_sent_whole():
    world = World(ScaleCom(density=1.0, beta=0.25), 1)
    world.states["tensor"] = [{"memory": np.array([4.0, 0])}]
    outcome = world.exchange([np.array([1.0, 2])])[0]
    assert outcome.mean.tolist() == [5, 2]
    assert outcome.state["memory"].tolist() == [3, 0]


def test_ranks_take_turns_in_every_framework():
    gradients = np.random.default_rng(5).normal(size=(3, 40)).astype(np.float32)
    for make in (np.array, torch.from_numpy, tf.constant):
        world = World(chain(via=leader_top_k(0.1)), 3)
        for step in range(4):
            outcome = world.exchange([make(g) for g in gradients])[0]
            xp = backend_of(outcome.mean)
            expected = np.sort(np.argsort(-np.abs(gradients[step % 3]))[:4])
            np.testing.assert_array_equal(xp.to_numpy(outcome.sent.indices), expected)


def test_the_step_may_be_a_symbol():
    """Who leads is found out when the graph runs."""
    gradient = np.random.default_rng(6).normal(size=100).astype(np.float32)
    via = leader_top_k(0.05)

    @tf.function
    def aggregate(x, step):
        exchange = via.aggregate(x, {}, Context(size=2, rank=1, step=step))
        request = next(exchange)
        theirs = tf.zeros(0, tf.uint8)
        frames = [theirs, request.payload]
        request = exchange.send(frames)
        return frames[1], request.array

    frame, values = aggregate(tf.constant(gradient), tf.constant(3, tf.int64))
    assert frame.shape == (16 + 8,)  # five indices, packed
    best = np.sort(np.argsort(-np.abs(gradient))[:5])
    np.testing.assert_array_equal(values.numpy(), gradient[best])


def test_bytes_of_scalecom():
    gradient = NORMAL[:1000]
    method = ScaleCom(density=0.01)
    for rank, size in ((0, 0), (1, 16 + 16), (2, 0)):  # ten indices, packed
        context = Context(rank=rank, size=3, step=4)
        exchange = method.exchange(gradient, method.init(gradient), context)
        request = next(exchange)
        assert (request.payload.size, request.equal_sizes) == (size, False)
        if rank == 1:
            frame = request.payload
            request = exchange.send([frame[:0], frame, frame[:0]])
            assert isinstance(request, Sum)
            assert request.array.size == 10


def test_ranks_that_count_steps_differently_are_noticed():
    method, gradient = ScaleCom(density=0.01), NORMAL[:1000]

    def begin(rank, step):
        exchange = method.exchange(
            gradient, method.init(gradient), Context(rank=rank, size=2, step=step)
        )
        return exchange, next(exchange).payload

    (here, mine), (_, theirs) = begin(0, 0), begin(1, 1)
    with pytest.raises(PayloadError, match="takes itself for the leader"):
        here.send([mine, theirs])
    (here, mine), (_, theirs) = begin(1, 0), begin(0, 1)
    with pytest.raises(PayloadError, match="less than a header"):
        here.send([theirs, mine])


def test_indices_that_were_damaged_are_noticed():
    method, gradient = ScaleCom(density=0.01), NORMAL[:1000]
    exchange = method.exchange(gradient, method.init(gradient), Context(size=2))
    frame = next(exchange).payload.copy()
    frame[20] ^= 1
    with pytest.raises(PayloadError, match=r"rank 0.*checksum"):
        exchange.send([frame, frame[:0]])


# -- all of them -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Threshold(tau=0), "tau must be"),
        (lambda: Threshold(tau=True), "tau must be"),
        (lambda: Threshold(send="bits"), "send must be"),
        (lambda: threshold(float("nan")), "tau must be"),
        (lambda: plus_minus(-1), "tau must be"),
        (lambda: AdaptiveThreshold(density=0), "density must be"),
        (lambda: adaptive_threshold(sample_fraction=0), "sample_fraction must be"),
        (lambda: MSTopK(density=2), "density must be"),
        (lambda: MSTopK(rounds=0), "rounds must be"),
        (lambda: MSTopK(values="int8"), "values must be"),
        (lambda: SIDCo(density=-1), "density must be"),
        (lambda: SIDCo(fit="normal"), "fit must be"),
        (lambda: SIDCo(stages=0), "stages must be"),
        (lambda: ScaleCom(density=0), "density must be"),
        (lambda: ScaleCom(beta=0), "beta must be"),
        (lambda: ScaleCom(selection="all"), "selection must be"),
        (lambda: low_pass_memory(2), "beta must be"),
    ],
)
def test_bad_options_are_errors(make, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        make()
