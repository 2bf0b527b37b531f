"""Ok-Topk: by hand, against a plain sum, and what it sends."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_compress import OkTopk
from hvd_compress.base import Context
from hvd_compress.blocks import chain, ok_topk
from hvd_compress.engines.joining import alone
from hvd_compress.engines.lockstep import World, run
from hvd_compress.meetings.ok_topk import Regions
from hvd_compress.requests import Alltoall


def of(outcomes, key):
    return [outcome.state[key].tolist() for outcome in outcomes]


def test_two_ranks_by_hand():
    """Regions begin at 0 and 7, and have the sums {0: 4, 1: 5} and {7: 2}: the two largest are in
    the result, the third waits on the ranks whose parts it has."""
    world = World(OkTopk(density=0.25), 2)
    gradients = [np.array([4.0, 0, 0, 0, 0, 0, 0, 3]), np.array([0, 5.0, 0, 0, 0, 0, 0, -1])]
    outcomes = world.exchange(gradients)
    assert outcomes[0].mean.tolist() == [2, 2.5, 0, 0, 0, 0, 0, 0]
    assert of(outcomes, "residual") == [[0] * 7 + [3], [0] * 7 + [-1]]
    assert of(outcomes, "global_threshold") == [[4], [4]]
    # The sum at 7 is 2, and nothing reaches 4: the threshold falls by 0.8 %.
    outcomes = world.exchange([np.zeros(8), np.zeros(8)])
    assert outcomes[1].mean.tolist() == [0] * 8
    assert of(outcomes, "residual") == [[0] * 7 + [3], [0] * 7 + [-1]]
    assert of(outcomes, "global_threshold") == [[4 / 1.008], [4 / 1.008]]
    # A sum of 2 + 3 reaches it.
    outcomes = world.exchange([np.array([0.0] * 7 + [3]), np.zeros(8)])
    assert outcomes[0].mean.tolist() == [0] * 7 + [2.5]
    assert of(outcomes, "residual") == [[0] * 8, [0] * 8]


@given(
    size=st.sampled_from([1, 2, 3, 5, 8, 17]),
    n=st.integers(20, 90),
    part=st.sampled_from([10, 3, 2]),
    every=st.sampled_from([1, 3, 4]),
    indices=st.sampled_from(["packed", "int32"]),
    dtype=st.sampled_from(["float32", "float64"]),
    seed=st.integers(0, 1000),
)
def test_the_result_is_the_largest_sums_or_between_exact_steps_all_that_reach_the_threshold(
    size, n, part, every, indices, dtype, seed
):
    """Added in the order of the ranks, and of the entries that are not in it each stays with its
    rank."""
    random, k = np.random.default_rng(seed), n // part
    world = World(OkTopk(k / n, threshold_every=every, indices=indices), size)
    threshold, left = 0.0, [np.zeros(n, dtype)] * size
    for step in range(5):
        gradients = [random.standard_normal(n).astype(dtype) for _ in range(size)]
        outcomes = world.exchange(gradients)
        total, chosen, went_in = np.zeros(n, dtype), [], []
        for gradient, rest in zip(gradients, left, strict=True):
            went_in.append(gradient + rest)
            chosen.append(np.sort(np.argsort(-np.abs(went_in[-1]), kind="stable")[:k]))
            total[chosen[-1]] += went_in[-1][chosen[-1]]
        if step % every:
            places = np.flatnonzero((np.abs(total) >= threshold) & (total != 0))
        else:
            places = np.sort(np.argsort(-np.abs(total), kind="stable")[:k])
            assert np.abs(total[places]).min() == outcomes[0].state["global_threshold"]
        expected = np.zeros(n, dtype)
        expected[places] = total[places]
        left = []
        for outcome, x, own in zip(outcomes, went_in, chosen, strict=True):
            np.testing.assert_array_equal(outcome.mean, expected / size)
            rest = x.copy()
            rest[np.intersect1d(own, places)] = 0
            np.testing.assert_array_equal(outcome.state["residual"], rest)
            left.append(rest)
        threshold = outcomes[0].state["global_threshold"][0]


@pytest.mark.parametrize(
    ("count", "factor"),
    [(66, 1 / 1.008), (67, 1), (100, 1), (133, 1), (134, 1.008), (200, 1.008), (201, None)],
)
def test_the_threshold_follows_the_number_of_sums(count, factor):
    """k = 100, and three ranks bring 300 different elements, of which so many reach it.  Beyond
    2 k it is exact at once."""
    n, size = 1000, 3
    x = np.float64(np.arange(n, 0, -1) * (-1) ** np.arange(n))
    brought = [np.zeros(n) for _ in range(size)]
    for rank, own in enumerate(brought):
        own[rank:300:size] = x[rank:300:size]
    method, old = OkTopk(density=0.1), n - count + 1.0
    state = {"residual": np.zeros(n), "global_threshold": np.array([old])}
    outcomes = run(
        [
            method.exchange(gradient, state, Context(rank=rank, size=size, step=1))
            for rank, gradient in enumerate(brought)
        ]
    )
    for outcome in outcomes:
        assert np.flatnonzero(outcome.mean).tolist() == list(range(count))
        new = n - 100 + 1 if factor is None else old * factor
        assert outcome.state["global_threshold"].tolist() == [pytest.approx(new, rel=1e-15)]


def test_nan_in_the_first_step_leaves_no_threshold():
    """In later ones it is a law of the kit."""
    world, gradients = World(OkTopk(density=0.05), 3), np.random.default_rng(0).normal(size=(3, 90))
    spoilt = gradients.copy()
    spoilt[2, 17] = np.nan
    for outcome in world.exchange(list(spoilt)):
        assert not np.isfinite(outcome.mean).all()
        assert all(np.isfinite(array).all() for array in outcome.state.values())
    assert np.isfinite(world.exchange(list(gradients))[0].mean).all()
    assert world.states["tensor"][0]["global_threshold"] > 0


def test_zeros_and_ties():
    """A threshold that has become too small, or 0, does not let everything pass for long."""
    n, size = 90, 3
    world = World(chain(via=ok_topk(density=20 / n)), size)
    assert not world.exchange([np.zeros(n)] * size)[0].mean.any()
    assert world.states["tensor"][0]["global_threshold"] == 0
    few = np.zeros(n)
    few[[3, 80]] = 1
    assert np.flatnonzero(world.exchange([few] * size)[0].mean).tolist() == [3, 80]
    outcome = world.exchange([np.ones(n)] * size)[0]
    assert np.flatnonzero(outcome.mean).tolist() == list(range(20))
    everything = [np.roll(np.arange(n) + 1.0, 30 * rank) for rank in range(size)]
    counts = [np.count_nonzero(world.exchange(everything)[0].mean) for _ in range(2)]
    assert counts == [60, 21]


def test_regions_follow_the_entries():
    """All entries are in the first tenth, and each owner receives as many of them."""
    n, k, size = 4000, 80, 4
    random = np.random.default_rng(0)
    received = []

    def note(request, reply):
        if isinstance(request, Alltoall):
            received.append(sum(part.nbytes - 16 for part in reply) / 8)

    def exchange(rank):
        gradient = np.zeros(n, np.float32)
        gradient[random.choice(400, k, replace=False)] = 1 + random.random(k)
        context = Context(rank=rank, size=size)
        method = OkTopk(k / n, indices="int32")
        return alone(method.exchange(gradient, method.init(gradient), context), note)

    run([exchange(rank) for rank in range(size)])
    assert len(received) == size
    assert max(received) < 1.1 * k
    regions = Regions(n, k, "float32", Context(rank=1, size=4))
    assert regions.bounds(np.array([4.0, 8.0, 1200.0])) == [0, 1, 2, 300, 4000]
    assert regions.bounds(np.array([8.0, -4.0, 1e9])) == [0, 2, 2, 4000, 4000]
    assert regions.bounds(np.array([np.nan, 8.0, 1.0])) == [0, 0, 0, 0, 4000]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_values_in_float16_lose_nothing(dtype):
    """Rounding errors are in the residuals, also off sums and off what float16 has no room
    for."""
    n, size = 300, 4
    random = np.random.default_rng(0)
    world = World(OkTopk(density=0.1, threshold_every=3, values="float16"), size)
    went_in, came = np.zeros(n), np.zeros(n)
    for step in range(7):
        gradients = [random.standard_normal(n).astype(dtype) for _ in range(size)]
        if step == 2:
            for gradient in gradients:
                gradient[7] = 3e4 if dtype == "float16" else 1e6
        outcomes = world.exchange(gradients)
        went_in += sum(gradient.astype(np.float64) for gradient in gradients)
        sums = outcomes[0].mean.astype(np.float64) * size
        came += sums
        np.testing.assert_array_equal(sums, sums.astype(np.float16))
        assert step != 2 or np.abs(sums).max() == 65504
    left = sum(outcome.state["residual"].astype(np.float64) for outcome in outcomes)
    lost = np.abs(came + left - went_in)
    assert lost[7] <= 1  # whose residual is large
    assert np.delete(lost, 7).max() < (1e-9 if dtype == "float64" else 1e-5)
    assert left[sums != 0].any()


def test_a_state_goes_to_another_number_of_ranks():
    random = np.random.default_rng(0)
    three = World(OkTopk(density=0.1), 3)
    for _ in range(2):
        three.exchange(list(random.standard_normal((3, 200))))
    two = World(OkTopk(density=0.1), 2)
    two.states["tensor"], two.steps["tensor"] = three.states["tensor"][:2], 2
    outcomes = two.exchange(list(random.standard_normal((2, 200))))
    assert 0 < np.count_nonzero(outcomes[0].mean) <= 40
    np.testing.assert_array_equal(outcomes[0].mean, outcomes[1].mean)


@pytest.mark.parametrize("size", [4, 16, 32])
def test_a_rank_sends_and_receives_less_than_six_k_entries(size):
    """Entries of four bytes and a packed index; headers and sizes not counted as such."""
    n, density = 40_000, 0.01
    k = int(n * density)
    method = OkTopk(density=density)
    random = np.random.default_rng(0)
    base = random.standard_normal(n)
    states = [method.init(np.zeros(n, np.float32)) for _ in range(size)]
    for step in range(3):
        received = np.zeros(size)

        def exchange(rank, step=step, received=received, states=states):
            gradient = (base + random.standard_normal(n)).astype(np.float32)
            context = Context(rank=rank, size=size, step=step)

            def note(request, reply):
                parts = reply if isinstance(reply, list) else [reply]
                received[rank] += sum(part.nbytes for part in parts)

            return alone(method.exchange(gradient, states[rank], context), note)

        outcomes = run([exchange(rank) for rank in range(size)])
        states = [outcome.state for outcome in outcomes]
        if step:  # the first step is exact, with all sums of all regions
            headers = 3 * 32 * size
            assert received.max() < 6 * k * 4 + headers, (step, received.max() / k)
