"""Methods by tensor and by time, and their momenta."""

import dataclasses

import numpy as np
import pytest

from hvd_compress import (
    DGC,
    FP16,
    QSGD,
    After,
    ConfigError,
    MomentumAfter,
    NoCompression,
    Outcome,
    PowerSGD,
    Signum,
    Sum,
    Switch,
    TopK,
    UnsupportedError,
    from_config,
    partition,
    rule,
    switch,
)
from hvd_compress.engines.lockstep import World
from hvd_compress.methods.chained import Chained
from hvd_compress.schedules import schedules_of, with_values
from hvd_compress.stats import norm_of_residual
from tests.stateless import Stateless

DENSE = DGC(density=1.0, min_size=0)


def gradients(seed, size=3, shape=(6, 5)):
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape) for _ in range(size)]


def directions(method, steps, name="weight", **context):
    world = World(method, 3)
    return [world.exchange(gradients(s), name, **context)[0].direction for s in range(steps)]


def test_the_first_rule_that_fits_decides():
    chosen = partition(
        ("*.bias", "fp16"),
        rule(PowerSGD(rank=4), ndim=2, min_size=100),
        rule(QSGD(), names="scale", ndim=1),
        otherwise=TopK,
    )
    assert chosen.for_tensor("fc.bias", (1000, 1000)) == FP16()
    assert chosen.for_tensor("fc.weight", (10, 10)) == PowerSGD(rank=4)
    assert chosen.for_tensor("fc.weight", (10, 9)) == TopK()
    assert chosen.for_tensor("conv", (10, 10, 3)) == TopK()
    assert chosen.for_tensor("scale", (10,)) == QSGD()
    assert chosen.for_tensor("scale", (10, 1)) == TopK()
    assert chosen.for_tensor("shift", (10,)) == TopK()
    assert from_config(chosen.to_config()) == chosen


def test_tensors_travel_as_their_methods_do():
    chosen = partition(("a*", TopK(density=0.1)), otherwise=QSGD())
    for name, method in (("a1", TopK(density=0.1)), ("b", QSGD())):
        np.testing.assert_equal(directions(chosen, 4, name), directions(method, 4, name))


@pytest.mark.parametrize("nesterov", [False, True])
def test_all_tensors_have_momentum_or_none(nesterov):
    """DGC at density 1 is momentum SGD; so what stands beside it must be."""
    chosen = partition(("a*", DENSE), otherwise="none")
    assert chosen.takes_momentum
    context = {"momentum": 0.9, "nesterov": nesterov}
    ours, theirs = (directions(chosen, 5, name, **context) for name in "ab")
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    assert not partition(("a*", TopK()), otherwise="none").takes_momentum


def test_momentum_after_a_method():
    plain, wrapped = TopK(density=0.2), MomentumAfter(TopK(density=0.2))
    velocity = 0.0
    for ours, mean in zip(directions(wrapped, 5, momentum=0.9), directions(plain, 5), strict=True):
        velocity = 0.9 * velocity + mean
        np.testing.assert_allclose(ours, velocity, rtol=1e-12)


def test_momenta_must_agree():
    with pytest.raises(ConfigError, match="momentum is the optimizer's"):
        partition(("a", DGC(momentum=0.9)), otherwise=DGC(momentum=0.8))
    assert partition(("a", DGC(momentum=0.9)), otherwise="none").momentum == 0.9


class Plain(Stateless, name="test-plain"):
    def exchange(self, gradient, state, context):
        total = yield Sum(gradient)
        return Outcome(total / context.size, gradient.reshape(-1), state)


def test_what_is_no_chain_cannot_get_momentum():
    assert partition(("a", Plain())).for_tensor("a", (2,)).name == "test-plain"
    with pytest.raises(ConfigError, match="leaves momentum to the optimizer"):
        partition(("a", Plain()), otherwise=DGC())


@pytest.mark.parametrize("rules", [(("a", 3),), ((3, "none"),), ("none",)])
def test_bad_rules(rules):
    with pytest.raises((ConfigError, TypeError)):
        partition(*rules).for_tensor("a", (2,))


def test_a_partition_wants_names():
    with pytest.raises(TypeError, match="for_tensor"):
        partition().init(np.zeros(3))


def test_switching_in_mid_training():
    method = switch("none", TopK(density=0.2), 3)
    found = directions(method, 6)
    np.testing.assert_equal(found[:3], directions(NoCompression(), 3))
    later = World(TopK(density=0.2), 3)
    for step in range(3, 6):
        expected = later.exchange(gradients(step), "weight")[0].direction
        np.testing.assert_array_equal(found[step], expected)


@pytest.mark.parametrize("then", [DGC(density=0.1, min_size=0), Signum()])
def test_ranks_stay_equal_over_a_switch(then):
    world = World(switch("none", then, 2), 3)
    for step in range(5):
        outcomes = world.exchange(gradients(step), momentum=0.9)
        for outcome in outcomes:
            np.testing.assert_array_equal(outcome.direction, outcomes[0].direction)
    with pytest.raises(ConfigError, match="'velocity' differs between ranks"):
        World(switch(then, "none", 2), 3).exchange(gradients(0), momentum=0.9)


def test_what_waits_goes_on_waiting():
    world = World(switch(TopK(density=0.1), "none", 2), 2)
    for step in range(2):
        world.exchange(gradients(step, 2))
    waiting = [state["residual"].copy() for state in world.states["tensor"]]
    world.exchange(gradients(2, 2))
    for before, state in zip(waiting, world.states["tensor"], strict=True):
        np.testing.assert_array_equal(state["residual"], before)


def test_switches_by_epoch_and_of_switches():
    method = switch(switch("none", FP16, 2), DGC(), After("epoch", 3))
    assert method.needs_epoch
    assert method.takes_momentum
    assert len(schedules_of(method)) == 2
    fixed = with_values(method, dict.fromkeys(schedules_of(method), True))
    assert isinstance(fixed, Switch)
    assert not fixed.needs_epoch
    ours, theirs = (directions(each, 3, momentum=0.9) for each in (fixed, DGC()))
    np.testing.assert_equal(ours, theirs)


def test_a_method_without_phases_says_so():
    with pytest.raises(UnsupportedError, match="topk does the same in every step"):
        TopK(0.1).phase_index(np.asarray(1))


def test_signs_of_a_moving_average_by_hand():
    """m = -0.5, then -0.25 + 0.15 = -0.1; with Nesterov -0.05 + 0.15 in its place."""
    gradients = [np.array([-1.0]), np.array([0.3])]
    for nesterov, votes in ((False, [-1, -1]), (True, [-1, 1])):
        for method in (Signum(), Signum(momentum=0.5, nesterov=nesterov)):
            world = World(method, 1)
            context = {"momentum": 0.5, "nesterov": nesterov}
            found = [world.exchange([x], **context)[0].direction.item() for x in gradients]
            assert found == votes


def test_a_direction_that_does_not_fit_leaves_no_trace():
    """The mean may have room in half precision, and momentum's sum of means not."""
    world = World(DGC(momentum=0.9, min_size=0), 1)
    x = np.full(5, 20_000, np.float16)
    finite = []
    for _ in range(20):
        before = world.states.get("tensor", [{}])[0]
        outcome = world.exchange([x])[0]
        assert np.isfinite(outcome.mean).all()
        finite.append(bool(np.isfinite(outcome.direction).all()))
        if not finite[-1]:
            np.testing.assert_array_equal(outcome.state["velocity"], before["velocity"])
    assert finite[0]
    assert not finite[-1]


def test_all_that_waits_is_counted():
    state = {"residual": np.array([3.0]), "owner_residual": np.array([4.0]), "velocity": np.ones(9)}
    assert norm_of_residual(state) == 5
    assert norm_of_residual({"memory": np.array([2.0])}) == 2
    assert norm_of_residual({"velocity": np.ones(1)}) is None


def test_a_method_without_blocks_is_told_what_to_write():
    @dataclasses.dataclass(frozen=True)
    class Empty(Chained):
        pass

    with pytest.raises(ConfigError, match=r"Empty has no blocks.*property blocks"):
        Empty()
