"""Leader SGD and EASGD, in NumPy and lockstep."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_compress.errors import CompressionError, ConfigError
from hvd_compress.systems import Ranks
from hvd_compress.systems.leader_sgd import pack, unpack
from hvd_compress.systems.rounds import EASGD, LeaderSGD
from tests.systems.quadratics import Quadratics

PERSISTENT = {
    "local_every": 1,
    "global_every": 1,
    "local_pull": 0.0,
    "local_drift": 0.0,
}


def test_one_leader_by_hand():
    ranks = Quadratics(LeaderSGD(**PERSISTENT), (2, -1))
    expected = ((1.5, -0.9), (1.11, -0.81), (0.807, -0.729))
    for values in expected:
        assert ranks.step() == pytest.approx(values, abs=1e-12)


def test_easgd_by_hand():
    ranks = Quadratics(EASGD(sync_every=1, alpha=0.1, beta=0.2), (2, -1))
    ranks.world.states = [{"centre": {"x": np.zeros(1)}} for _ in range(2)]
    assert ranks.step() == pytest.approx((1.6, -0.8))
    for state in ranks.world.states:
        assert state["centre"]["x"] == pytest.approx([0.1])


def well(x):
    """The gradient of (x^2 - 1)^2."""
    return 4 * x * (x**2 - 1)


def test_easgd_is_trapped_by_symmetry():
    method = EASGD(sync_every=1, alpha=0.01, beta=0.02)
    ranks = Quadratics(method, (0.4, -0.4), lr=0.01, gradient=well)
    ranks.world.states = [{"centre": {"x": np.zeros(1)}} for _ in range(2)]
    values = ranks.run(3000)
    assert values == pytest.approx((0.8660254, -0.8660254), abs=1e-6)
    assert ranks.world.states[0]["centre"]["x"] == pytest.approx([0.0], abs=1e-9)
    assert (values[0] ** 2 - 1) ** 2 == pytest.approx(0.0625, abs=1e-6)


@pytest.mark.parametrize(
    ("rho", "follower", "within"),
    [(0.5, (1 + 0.5**0.5) / 2, 1e-6), (1.0, 0.5, 1e-2), (1.5, -1.0, 1e-6)],
)
def test_leader_sgd_breaks_the_symmetry(rho, follower, within):
    method = LeaderSGD(**{**PERSISTENT, "global_pull": 0.01 * rho})
    ranks = Quadratics(method, (0.4, -0.41), lr=0.01, gradient=well)
    for _ in range(4000):
        ranks.step([(x**2 - 1) ** 2 for x in ranks.values])
    assert ranks.values[1] == pytest.approx(-1.0, abs=1e-9)
    assert ranks.values[0] == pytest.approx(follower, abs=within)


def test_the_pull_is_no_ascent_on_convex_functions():
    """<grad f(x), x - z> >= f(x) - f(z) >= 0 for a leader that is at least as good."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        root = rng.normal(size=(4, 4))
        hessian = root @ root.T
        x, z = rng.normal(size=(2, 4))
        f = [0.5 * point @ hessian @ point for point in (x, z)]
        if f[1] > f[0]:
            x, z, f = z, x, f[::-1]
        assert (hessian @ x) @ (x - z) >= f[0] - f[1] - 1e-12


@pytest.mark.parametrize("method", [LeaderSGD(**PERSISTENT), EASGD(sync_every=1, beta=0.5)])
def test_consensus_at_a_minimum_stays(method):
    assert Quadratics(method, (3, 3, 3), b=3).run(5) == pytest.approx([3.0] * 3)


def test_groups_have_leaders_of_their_own():
    method = LeaderSGD(local_every=1, global_every=2, groups=2)
    ranks = Quadratics(method, (4, 3, 2, 1), gradient=lambda x: x * 0)
    ranks.step(losses=[4, 3, 2, 1])
    assert ranks.values == pytest.approx((3.9, 3, 1.9, 1))
    ranks.step(losses=[3, 4, 2, 1])
    # The pull to the leader of the group, now 3.9 in the first, and to that of all, now 1.
    assert ranks.values == pytest.approx(
        (3.9 - 0.29, 3 + 0.09 - 0.2, 1.9 - 0.09 - 0.09, 1), abs=1e-12
    )


def test_groups_are_those_of_the_nodes():
    method = LeaderSGD(local_every=1, global_every=4)
    ranks = Quadratics(method, (4, 3, 2, 1), gradient=lambda x: 0 * x, nodes=["a", "b", "a", "b"])
    assert ranks.step(losses=[1, 2, 3, 4]) == pytest.approx((4, 3, 2.2, 1.2))


def test_ranks_drift_to_the_last_leader_they_know():
    method = LeaderSGD(
        local_every=2,
        global_every=2,
        local_pull=0,
        local_drift=0,
        global_pull=0.1,
        global_drift=0.2,
    )
    ranks = Quadratics(method, (2, 1), gradient=lambda x: 0 * x)
    assert ranks.step(losses=[2, 1]) == [2, 1], "no leader is known yet"
    assert ranks.step(losses=[2, 1]) == pytest.approx((1.9, 1))
    assert ranks.step(losses=[9, 9]) == pytest.approx((1.81, 1)), "0.2 of every second step"
    assert ranks.world.exchanges == 1


def test_the_leader_is_chosen_by_the_mean_loss():
    method = LeaderSGD(**{**PERSISTENT, "local_every": 3, "global_every": 3})
    ranks = Quadratics(method, (2, 1), gradient=lambda x: 0 * x)
    for losses in ((1, 3), (1, 3), (3, 0)):  # the last is a lucky batch
        ranks.step(losses=losses)
    assert ranks.values == [2, 1 + 0.1 * (2 - 1)]


def test_nan_does_not_lead():
    ranks = Quadratics(LeaderSGD(**PERSISTENT), (np.nan, 1, 2), gradient=lambda x: 0 * x)
    with pytest.warns(RuntimeWarning, match="step 1: it goes on from those of its leader"):
        assert ranks.step(losses=[np.nan, 2, 3]) == pytest.approx((1, 1, 1.9))
    assert ranks.step(losses=[np.nan] * 3) == pytest.approx((1, 1, 1.9))


def test_nobody_moves_to_a_centre_of_nan():
    ranks = Quadratics(EASGD(sync_every=1, beta=0.5), (1, np.nan, 3), gradient=lambda x: 0 * x)
    ranks.world.states = [{"centre": {"x": np.zeros(1)}} for _ in range(3)]
    with pytest.warns(RuntimeWarning, match="exchange of step 1 is lost"):
        assert ranks.step() == [1, 0, 3]
    assert ranks.world.states[2]["centre"]["x"] == 0


@pytest.mark.parametrize(
    ("losses", "sent"),
    [
        ([2, 1, 4, 3], 32),  # rank 0 leads nobody
        ([1, 2, 0, 3], 32 + 816),  # its group: a frame of 100 numbers to one rank
        ([1, 2, 4, 3], 32 + 816 + 800),  # and all, by a broadcast
    ],
)
def test_only_leaders_send_parameters(losses, sent):
    method = LeaderSGD(local_every=1, global_every=1, groups=2)
    world = Ranks(method, 4)
    x = [{"w": np.ones(100) * rank} for rank in range(4)]
    world.before_step(x, losses=losses)
    assert world.bytes_sent == sent


def test_a_leader_to_whom_nobody_is_pulled_sends_nothing():
    world = Ranks(LeaderSGD(**PERSISTENT), 4)
    x = [{"w": np.ones(100) * rank} for rank in range(4)]
    world.before_step(x, losses=[1, 2, 3, 4])
    assert world.bytes_sent == 32 + 800
    assert "group_leader" not in world.states[0]


def test_arrays_of_several_dtypes_are_packed():
    arrays = {
        "a": np.arange(6.0).reshape(2, 3),
        "b": np.ones(2, np.float32),
        "c": np.array([7.0]),
    }
    flat = pack(arrays)
    assert [part.size for part in flat] == [7, 2]
    for name, x in unpack(flat, arrays).items():
        assert x.dtype == arrays[name].dtype
        assert (x == arrays[name]).all()


def test_a_loss_is_needed():
    with pytest.raises(CompressionError, match="losses"):
        Ranks(LeaderSGD(), 1).before_step([{"w": np.ones(1)}])


def test_periods_that_do_not_meet():
    with pytest.raises(ConfigError, match="multiple of local_every=4"):
        LeaderSGD(global_every=6, local_every=4)
