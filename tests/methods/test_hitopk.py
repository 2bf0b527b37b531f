"""HiTopK: by hand, over real and pretended nodes, and what it keeps."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_compress import ConfigError, HiTopK, MSTopK
from hvd_compress.base import Context
from hvd_compress.blocks import chain, nodes_top_k, random_k, sidco, threshold, top_k
from hvd_compress.engines import lockstep
from hvd_compress.engines.base import watched
from hvd_compress.engines.lockstep import World
from hvd_compress.requests import Alltoall, Neighbors

#: of each rank; two nodes with two ranks each
GRADIENTS = np.array(
    [
        [1, 5, 0, 2, 0, 1, 3, 1],
        [1, 2, 0, 2, 1, 1, -2, 5],
        [3, 1, 1, 0, 1, 0, 2, 0],
        [1, 2, 4, 0, 0, 0, 0, 1],
    ],
    np.float32,
)
BY_HAND = chain(via=nodes_top_k(top_k(0.25, "exact"), ranks_per_node=2))


def test_a_step_by_hand():
    """Sums of the first node are 2 7 0 4 | 1 2 1 6, of the second 4 3 5 0 | 1 0 2 1.  Of each shard
    of four the largest is sent: 7 and 6, 5 and 2."""
    world = World(BY_HAND, 4)
    for outcome in world.exchange(list(GRADIENTS)):
        np.testing.assert_array_equal(outcome.mean, np.array([0, 7, 5, 0, 0, 0, 2, 6]) / 4)
    kept = [state["owner_residual"] for state in world.states["tensor"]]
    np.testing.assert_array_equal(
        kept,
        [
            [2, 0, 0, 4, 0, 0, 0, 0],
            [0, 0, 0, 0, 1, 2, 1, 0],
            [4, 3, 0, 0, 0, 0, 0, 0],
            [0, 0, 0, 0, 1, 0, 0, 1],
        ],
    )
    # What was kept is sent in the end: 4 and 2 of the first node, 4 and 1 of the second.
    outcome = world.exchange([np.zeros(8, np.float32)] * 4)[0]
    np.testing.assert_array_equal(outcome.mean, np.array([4, 0, 0, 4, 1, 2, 0, 0]) / 4)


def test_only_dense_shards_travel_inside_and_only_entries_between():
    gradients = np.random.default_rng(0).standard_normal((6, 600)).astype(np.float32)
    method, seen = HiTopK(density=0.01, ranks_per_node=3, indices="int32"), []
    exchanges = [
        method.exchange(g, method.init(g), Context("x", rank, 6))
        for rank, g in enumerate(gradients)
    ]
    exchanges[4] = watched(exchanges[4], lambda request, reply: seen.append(request))
    lockstep.run(exchanges)
    dense, across, inside = seen
    assert isinstance(dense, Alltoall)
    assert [payload.size for payload in dense.payloads] == [0, 0, 0, *[16 + 4 * 200] * 3]
    assert isinstance(across, Neighbors)
    assert across.targets == across.sources == (1,)
    assert across.payload.size == 16 + 2 * 8
    assert isinstance(inside, Neighbors)
    assert inside.targets == inside.sources == (3, 5)
    assert inside.payload.size <= 16 + 4 * 8


@pytest.mark.parametrize(("size", "per_node"), [(1, 4), (4, 2), (4, 4), (5, 2), (6, 3), (7, 3)])
def test_nothing_is_lost_over_many_steps(size, per_node):
    """Uneven nodes too: their first ranks own everything."""
    method = HiTopK(density=0.02, ranks_per_node=per_node)
    world, random = World(method, size), np.random.default_rng(size)
    went_in, came_out = np.zeros(300), np.zeros(300)
    for _ in range(20):
        gradients = [random.standard_normal(300).astype(np.float32) for _ in range(size)]
        outcomes = world.exchange(gradients)
        assert len({outcome.mean.tobytes() for outcome in outcomes}) == 1
        went_in += np.mean(gradients, axis=0, dtype=np.float64)
        came_out += outcomes[0].mean
    kept = sum(state["owner_residual"] for state in world.states["tensor"]) / size
    np.testing.assert_allclose(came_out + kept, went_in, atol=1e-4)
    owners = [i for i, s in enumerate(world.states["tensor"]) if s["owner_residual"].any()]
    firsts = list(range(0, size, per_node))
    assert owners == (firsts if size % per_node else list(range(size)))


def test_what_is_kept_moves_when_the_ranks_change():
    """Four ranks in two nodes, then their average on two ranks in one node."""
    random = np.random.default_rng(0)
    method = HiTopK(density=0.02, ranks_per_node=2)
    world = World(method, 4)
    for _ in range(3):
        world.exchange([random.standard_normal(100).astype(np.float32) for _ in range(4)])
    mean = sum(state["owner_residual"] for state in world.states["tensor"]) / 4
    smaller = World(method, 2)
    smaller.exchange([np.zeros(100, np.float32)] * 2)
    smaller.states["tensor"] = [{"owner_residual": mean.copy()} for _ in range(2)]
    outcome = smaller.exchange([np.zeros(100, np.float32)] * 2)[0]
    kept = [state["owner_residual"] for state in smaller.states["tensor"]]
    np.testing.assert_allclose(outcome.mean + sum(kept) / 2, mean, atol=1e-6)
    assert not kept[0][50:].any()
    assert not kept[1][:50].any()


def test_with_one_rank_a_node_it_is_mstopk():
    random = np.random.default_rng(1)
    ours, theirs = World(HiTopK(density=0.05), 3), World(MSTopK(density=0.05), 3)
    for _ in range(5):
        gradients = [random.standard_normal(200).astype(np.float32) for _ in range(3)]
        a, b = ours.exchange(gradients)[0], theirs.exchange(gradients)[0]
        np.testing.assert_allclose(a.mean, b.mean, atol=1e-7)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: HiTopK(ranks_per_node=0), "ranks_per_node"),
        (lambda: HiTopK(ranks_per_node=2.5), "ranks_per_node"),
        (lambda: HiTopK(density=2), "density"),
        (lambda: HiTopK(rounds=0), "rounds"),
        (lambda: HiTopK(indices="int8"), "indices"),
        (lambda: nodes_top_k(random_k(0.1)), "select"),
        (lambda: nodes_top_k(sidco(0.1)), "select"),
        (lambda: nodes_top_k(0.1), "select"),
    ],
)
def test_bad_options(make, word):
    with pytest.raises(ConfigError, match=word):
        make()


def test_other_operators_select_as_well():
    outcome = World(chain(via=nodes_top_k(threshold(3.5), 2)), 4).exchange(list(GRADIENTS))[0]
    np.testing.assert_array_equal(outcome.mean, np.array([4, 7, 5, 4, 0, 0, 0, 6]) / 4)
