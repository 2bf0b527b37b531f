"""gTop-k as a method: merging in pairs."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_compress import ConfigError, Context, GTopK, Swap, TopK, chain, gtop_k
from hvd_compress.aggregators.gtop_k import turns
from hvd_compress.errors import CompressionError, PayloadError
from hvd_compress.lockstep import World, reply_to
from hvd_compress.wire import sparse_size


def test_two_ranks_by_hand():
    """The largest of the sums, (3, 4), is at 1; but nobody's first choice was there together."""
    world = World(GTopK(density=0.5), 2)
    outcomes = world.exchange([np.array([3.0, 2]), np.array([0.0, 2])])
    assert outcomes[0].mean.tolist() == [1.5, 0]
    assert [o.state["residual"].tolist() for o in outcomes] == [[0, 4], [0, 0]]
    # (0, 4) and (0, 0) wait: rank 0 keeps what was dropped, and nothing is lost.
    assert world.exchange([np.zeros(2), np.zeros(2)])[1].mean.tolist() == [0, 2]


def test_a_place_that_is_small_everywhere_is_dropped():
    gradients = [np.array([2.0, 3, 0]), np.array([2.0, 0, 4]), np.array([2.0, 0, 0])]
    outcomes = World(GTopK(density=0.3), 3).exchange(gradients)
    assert outcomes[0].mean.tolist() == [0, 0, pytest.approx(4 / 3)]


@pytest.mark.parametrize("size", range(1, 18))
def test_partners_name_each_other(size):
    plans = [turns(rank, size) for rank in range(size)]
    assert {len(plan) for plan in plans} == {len(plans[0])}
    extra = 0 if size & (size - 1) == 0 else 2
    assert len(plans[0]) == (size.bit_length() - 1) + extra
    for number in range(len(plans[0])):
        for rank, plan in enumerate(plans):
            partner, turn = plan[number]
            if partner is not None:
                other, theirs = plans[partner][number]
                assert other == rank
                assert {turn, theirs} <= {"keep", "merge", "give", "take"}
                # Where both merge, one keeps what is dropped, or a third rank does.
                assert not turn == theirs == "keep"


def merged_by_recursion(choices, k):
    """The tree of the paper, in dictionaries."""
    if len(choices) == 1:
        return choices[0]
    half = 1 << ((len(choices) - 1).bit_length() - 1)
    total = dict(merged_by_recursion(choices[:half], k))
    for place, value in merged_by_recursion(choices[half:], k).items():
        total[place] = total.get(place, 0) + value
    best = sorted(total, key=lambda place: (-abs(total[place]), place))[:k]
    return {place: total[place] for place in best}


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_pairs_find_what_a_tree_finds(size):
    random = np.random.default_rng(size)
    gradients = list(random.integers(-9, 10, (size, 200)) + random.random((size, 200)) / 8)
    outcome = World(chain(via=gtop_k(0.05, "exact")), size).exchange(gradients)[-1]
    choices = []
    for gradient in gradients:
        places = np.argsort(-np.abs(gradient), kind="stable")[:10]
        choices.append({int(place): gradient[place] for place in places})
    expected = np.zeros(200)
    for place, value in merged_by_recursion(choices, 10).items():
        expected[place] = value / size
    np.testing.assert_allclose(outcome.mean, expected, rtol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 8])
def test_what_waits_and_what_was_stepped_along_is_what_came(size):
    random = np.random.default_rng(size)
    world, came, went = World(GTopK(density=0.05), size), np.zeros(300), np.zeros(300)
    for _ in range(6):
        gradients = list(random.normal(size=(size, 300)))
        outcomes = world.exchange(gradients)
        came += sum(gradients)
        went += size * outcomes[0].mean
        waits = sum(outcome.state["residual"] for outcome in outcomes)
        np.testing.assert_allclose(went + waits, came, atol=1e-12)


def test_alone_it_is_top_k():
    gradient = np.random.default_rng(0).normal(size=100).astype(np.float32)
    ours, theirs = (World(m(density=0.1), 1).exchange([gradient])[0] for m in (GTopK, TopK))
    np.testing.assert_array_equal(ours.mean, theirs.mean)


def test_bytes_do_not_grow_with_the_number_of_ranks_but_for_its_logarithm():
    gradient, k = np.random.default_rng(0).normal(size=1000), 10
    for size, rounds in ((2, 1), (4, 2), (16, 4), (64, 6)):
        exchange = gtop_k(0.01).meet(gradient, {}, Context(rank=0, size=size))
        request, seen = next(exchange), 0
        try:
            while True:
                assert isinstance(request, Swap)
                assert request.payload.size == sparse_size(k, 1000, "float64")
                seen += 1
                request = exchange.send(request.payload)
        except StopIteration:
            assert seen == rounds


def test_damage_is_noticed():
    exchange = gtop_k(0.1).meet(np.arange(100.0), {}, Context(size=2))
    payload = next(exchange).payload.copy()
    payload[30] ^= 4
    with pytest.raises(PayloadError, match="a partner"):
        exchange.send(payload)


def test_partners_that_do_not_fit():
    byte = np.zeros(1, np.uint8)
    with pytest.raises(CompressionError, match="its partner 1, which has 1 for rank 2"):
        reply_to([Swap(byte, 1), Swap(byte, 2), Swap(byte, 1)], 0)
    with pytest.raises(CompressionError, match="rank 0 has 1 bytes"):
        reply_to([Swap(byte, 1), Swap(np.zeros(2, np.uint8), 0)], 0)
    assert reply_to([Swap(byte, None)], 0).size == 0


def test_bad_options():
    for make in (GTopK, gtop_k):
        with pytest.raises(ConfigError, match="density must be"):
            make(density=0)
