"""Codistillation in NumPy and lockstep: its losses, schedules, exchanges and laws."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hvd_compress import from_config
from hvd_compress.engines import lockstep
from hvd_compress.errors import ConfigError, MismatchError, PayloadError
from hvd_compress.systems.base import groups_of
from hvd_compress.systems.teachers import (
    Codistillation,
    CoordinatedSampler,
    Decay,
    Ramp,
    WeightDecay,
)
from hvd_compress.systems.teachers.exchanges import (
    Counterparts,
    exchange_checkpoints,
    exchange_predictions,
    fingerprint_of,
)
from hvd_compress.systems.teachers.losses import LOSSES, log_softmax, target
from tests.systems.ranks import Meeting, Model, ThreadEngine

# -- losses ---------------------------------------------------------------------------------------


def logits(*probabilities):
    return np.log(np.array([probabilities]))


def loss(name, z, *teachers):
    view, distance = LOSSES[name]
    return distance(z, target(view, teachers))


def test_the_direction_of_kl_by_hand():
    """KL(p || q) = .510826 and KL(q || p) = .368064 for p = (.5, .5) and q = (.9, .1)."""
    p, q = logits(0.5, 0.5), logits(0.9, 0.1)
    assert loss("kl", q, p) == pytest.approx(0.510826, abs=1e-6)  # of the teacher from the student
    assert loss("kl", p, q) == pytest.approx(0.368064, abs=1e-6)
    assert loss("reverse_kl", q, p) == pytest.approx(0.368064, abs=1e-6)
    assert loss("reverse_kl", p, q) == pytest.approx(0.510826, abs=1e-6)
    for name in ("kl", "reverse_kl", "mse"):
        assert loss(name, q, q) == pytest.approx(0.0, abs=1e-15)
    assert loss("cross_entropy", q, q) == pytest.approx(-0.9 * np.log(0.9) - 0.1 * np.log(0.1))


def test_certain_teachers():
    """A probability that is 0 contributes nothing."""
    certain, z = np.array([[0.0, -2000.0]]), logits(0.25, 0.75)
    assert loss("kl", z, certain) == pytest.approx(np.log(4))
    assert loss("cross_entropy", z, certain) == pytest.approx(np.log(4))


def gradient(name, z, *teachers, h=1e-6):
    found = np.zeros_like(z)
    for i in np.ndindex(z.shape):
        step = np.zeros_like(z)
        step[i] = h
        found[i] = (loss(name, z + step, *teachers) - loss(name, z - step, *teachers)) / (2 * h)
    return found


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_to_the_average_is_the_average_loss(name):
    """Up to a constant, for every loss: so teachers are averaged as their loss wants it."""
    random = np.random.default_rng(0)
    z, *teachers = random.standard_normal((4, 3, 5))
    each = np.mean([gradient(name, z, teacher) for teacher in teachers], 0)
    np.testing.assert_allclose(gradient(name, z, *teachers), each, atol=1e-9)


def test_gradients_by_hand():
    random = np.random.default_rng(1)
    z, one, two = random.standard_normal((3, 4, 5))
    soft = (np.exp(log_softmax(z)) - target(LOSSES["kl"].view, [one, two])) / 4
    np.testing.assert_allclose(gradient("kl", z, one, two), soft, atol=1e-9)
    np.testing.assert_allclose(gradient("cross_entropy", z, one, two), soft, atol=1e-9)
    np.testing.assert_allclose(
        gradient("mse", z, one, two), 2 * (z - (one + two) / 2) / 20, atol=1e-8
    )
    np.testing.assert_allclose(log_softmax(log_softmax(z)), log_softmax(z))


# -- schedules ------------------------------------------------------------------------------------


def test_when_what_happens():
    method = Codistillation(every=3, burn_in=4, weight=0.5)
    assert [step for step in range(1, 15) if method.is_due(step)] == [5, 8, 11, 14]
    assert [method.weight_at(step) for step in (1, 4, 5, 14)] == [0.0, 0.0, 0.5, 0.5]
    ramp = Codistillation(burn_in=10, weight=Ramp(to=2.0, steps=4))
    assert [ramp.weight_at(step) for step in (10, 11, 12, 14, 99)] == [0.0, 0.5, 1.0, 2.0, 2.0]
    decay = Codistillation(burn_in=10, weight=Decay(2.0, 0.5, (12, 20)))
    assert [decay.weight_at(step) for step in (10, 11, 12, 13, 21)] == [0.0, 2.0, 2.0, 1.0, 0.5]
    assert Codistillation().period == 50
    assert Codistillation("predictions").period == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"exchange": "gradients"}, "exchange must be one of 'checkpoints', 'predictions'"),
        ({"every": 0}, "every"),
        ({"burn_in": -1}, "burn_in"),
        ({"weight": -1.0}, "weight must be a number, 0 or more, or a schedule"),
        ({"weight": "ramp"}, "Ramp"),
        ({"loss": "l2"}, "loss must be one of"),
        ({"values": "int8"}, "values must be one of None, 'float16'"),
        ({"groups": [[0, 1], [1]]}, "groups must be None for a model on each rank"),
        ({"weight_decay": 5e-4}, "weight_decay must be WeightDecay"),
        ({"every": 4, "delay": 4}, "delay=4 must be less than every=4"),
        ({"exchange": "predictions", "delay": 1}, "delay is for exchange='checkpoints'"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        Codistillation(**options)


def test_bad_schedules_are_refused():
    for make, words in (
        (lambda: Ramp(steps=0), "steps"),
        (lambda: Ramp(to=-1), "to"),
        (lambda: Decay(factor=-1), "factor"),
        (lambda: Decay(at_steps=(0,)), "at_steps"),
        (lambda: WeightDecay(), "at_steps"),
        (lambda: WeightDecay((0.1, 0.2, 0.3), (5, 4)), "ascending"),
        (lambda: WeightDecay((0.1, -1.0), (5,)), "values"),
    ):
        with pytest.raises(ConfigError, match=words):
            make()


def test_options_survive_json_and_repr():
    for method in (
        Codistillation(),
        Codistillation("predictions", weight=Ramp(0.5, 7), groups=[[0, 1], [2, 3]]),
        Codistillation(weight_decay=WeightDecay([0.1, 0.0], at_steps=[7])),
        Codistillation(weight=Decay(1, 0.5, [3, 4]), groups=2, values="float16", every=5, delay=2),
    ):
        assert from_config(json.loads(json.dumps(method.to_config()))) == method
        assert eval(repr(method)) == method


# -- sampling -------------------------------------------------------------------------------------


def test_everybody_sees_the_same_order():
    one, other = CoordinatedSampler(10, seed=3), CoordinatedSampler(list(range(10)), seed=3)
    assert list(one) == list(other) == list(one)
    assert sorted(one) == list(range(10))
    first = list(one)
    one.set_epoch(1)
    assert list(one) != first
    assert list(CoordinatedSampler(4, shuffle=False)) == [0, 1, 2, 3]
    assert list(CoordinatedSampler(10, seed=-3)) != first


def test_places_share_the_examples():
    parts = [list(CoordinatedSampler(11, seed=1, place=place, places=3)) for place in range(3)]
    assert {len(part) for part in parts} == {3}
    assert len({example for part in parts for example in part}) == 9
    with pytest.raises(ConfigError, match="place=3 must be less than places=3"):
        CoordinatedSampler(10, place=3, places=3)
    with pytest.raises(ConfigError, match="examples"):
        CoordinatedSampler([])


def test_groups_see_the_same_examples_and_share_them():
    method = Codistillation("predictions", groups=2)
    owners = [Model(method, ThreadEngine(Meeting(4), rank)) for rank in range(4)]
    one, other, *second_group = [list(owner.sampler(11, seed=1)) for owner in owners]
    assert [one, other] == second_group
    assert len(one) == len(other) == 5
    assert len({*one, *other}) == 10


# -- who with whom --------------------------------------------------------------------------------


def test_without_groups_all_teach_all():
    assert Codistillation().counterparts(1, 3) == Counterparts((0, 2), (0, 2), 0, 1)
    assert Codistillation().counterparts(0, 1) == Counterparts((), (), 0, 1)


def test_groups_exchange_place_by_place():
    method = Codistillation(groups=2)
    assert method.counterparts(1, 4) == Counterparts((3,), (3,), 1, 2)
    uneven = Codistillation(groups=[[0, 1, 2], [3, 4]])
    assert uneven.counterparts(0, 5) == Counterparts((3,), (3,), 0, 3)
    assert uneven.counterparts(2, 5) == Counterparts((3,), (), 2, 3)
    assert uneven.counterparts(3, 5) == Counterparts((0,), (0, 2), 0, 2)
    assert groups_of(((0, 1, 2), (3,)), 4) == ((0, 1, 2), (3,))


@pytest.mark.parametrize("groups", [None, 1, 2, 3, [[4, 0], [1, 2, 3], [5]]])
def test_targets_are_those_who_wait(groups):
    method = Codistillation(groups=groups)
    peers = [method.counterparts(rank, 6) for rank in range(6)]
    for rank, own in enumerate(peers):
        assert all(rank in peers[source].targets for source in own.sources)
        assert all(rank in peers[target].sources for target in own.targets)
        assert len(own.sources) == len(groups_of(1 if groups is None else groups, 6)) - 1 or (
            not isinstance(groups, int | None) and len(own.sources) == len(groups) - 1
        )


def test_groups_that_cannot_be():
    with pytest.raises(ConfigError, match="are not of 5 ranks"):
        Codistillation(groups=[[0, 1], [2, 3]]).counterparts(0, 5)
    with pytest.raises(ConfigError, match="differ in size"):
        Codistillation("predictions", groups=2).counterparts(0, 5)


# -- messages -------------------------------------------------------------------------------------


def exchanged(function, own, size, groups=None, exchange="checkpoints", **more):
    method = Codistillation(exchange, groups=groups)
    peers = [method.counterparts(rank, size) for rank in range(size)]
    return lockstep.run([function(own[rank], peers[rank], **more) for rank in range(size)])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_predictions_arrive_in_rank_order(dtype):
    own = [np.full((2, 3), rank, dtype) for rank in range(3)]
    found = exchanged(exchange_predictions, own, 3, values=None, fingerprint=1)
    assert [[x[0, 0] for x in theirs] for theirs in found] == [[1, 2], [0, 2], [0, 1]]
    assert all(x.dtype == dtype and x.shape == (2, 3) for theirs in found for x in theirs)


def test_predictions_in_sixteen_bits():
    own = [np.array([[0.1, 1e-9]]) + rank for rank in range(2)]
    found = exchanged(exchange_predictions, own, 2, values="float16", fingerprint=0)
    np.testing.assert_array_equal(found[0][0], own[1].astype(np.float16).astype(float))
    assert found[0][0].dtype == "float64"


def test_an_empty_batch():
    own = [np.zeros((0, 3), "float32")] * 2
    found = exchanged(exchange_predictions, own, 2, values=None, fingerprint=0)
    assert found[1][0].shape == (0, 3)


def test_batches_that_differ():
    one, other = np.zeros((4, 3)), np.zeros((3, 3))
    with pytest.raises(MismatchError, match=r"float64 \(4, 3\), and rank 1 of float64 \(3, 3\)"):
        exchanged(exchange_predictions, [one, other], 2, values=None, fingerprint=0)
    both = [one, one.astype("float32")]
    with pytest.raises(MismatchError, match=r"float64 .* float32"):
        exchanged(exchange_predictions, both, 2, values=None, fingerprint=0)
    peers = [Codistillation("predictions").counterparts(rank, 2) for rank in range(2)]
    with pytest.raises(MismatchError, match="the inputs of this rank and of rank 1 differ"):
        lockstep.run([exchange_predictions(one, peers[rank], None, rank + 1) for rank in range(2)])
    a, b = np.arange(3.0), np.arange(3.0) + 1
    assert fingerprint_of([a]) == fingerprint_of([a.copy()]) != fingerprint_of([b])
    assert fingerprint_of([a[::2]]) == fingerprint_of([np.array([0.0, 2.0])])
    assert fingerprint_of([]) == 0


def test_damaged_predictions():
    exchange = exchange_predictions(np.zeros((1, 2)), Counterparts((1,), (1,), 0, 1), None, 0)
    next(exchange)
    with pytest.raises(PayloadError, match="damaged"):
        exchange.send([np.zeros(3, np.uint8)])


def test_integers_are_no_predictions():
    with pytest.raises(ConfigError, match="must be floats; got int64"):
        exchanged(exchange_predictions, [np.zeros(2, int)] * 2, 2, values=None, fingerprint=0)


@pytest.mark.parametrize("values", [None, "float16"])
def test_checkpoints_arrive_whole(values):
    random = np.random.default_rng(0)
    own = [
        {
            "w": random.standard_normal((2, 3)).astype("float32"),
            "scale": np.array(rank, "float64"),
            "b": np.zeros((0,), "float32"),
            "half": np.full(3, rank, "float16"),
        }
        for rank in range(5)
    ]
    groups = [[0, 1, 2], [3, 4]]
    found = exchanged(exchange_checkpoints, own, 5, groups, values=values)
    for rank, source in enumerate((3, 4, 3, 0, 1)):
        (arrays,) = found[rank]
        assert arrays.keys() == own[source].keys()
        for name, x in arrays.items():
            sent = own[source][name]
            assert x.dtype == sent.dtype
            np.testing.assert_array_equal(x, sent.astype(values or x.dtype).astype(x.dtype))


# -- laws -----------------------------------------------------------------------------------------


def coupled(alpha, b, start, steps, lr=0.05):
    """Ranks that each minimise (x - b_i)^2 / 2 + alpha / 2 times the square of the distance to the
    mean of the others, by exchanged predictions; the model predicts its x."""
    method = Codistillation("predictions", weight=alpha / 2, loss="mse")
    size = len(b)
    peers = [method.counterparts(rank, size) for rank in range(size)]
    x = [np.array([value], float) for value in start]
    history = [np.concatenate(x)]
    for step in range(1, steps + 1):
        found = lockstep.run(
            [exchange_predictions(x[rank], peers[rank], None, 0) for rank in range(size)]
        )
        for rank in range(size):
            mean = target(LOSSES["mse"].view, found[rank])
            pull = 2 * (x[rank] - mean)  # the gradient of the square
            x[rank] = x[rank] - lr * (x[rank] - b[rank] + method.weight_at(step) * pull)
        history.append(np.concatenate(x))
    return np.array(history)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 3.0])
def test_the_fixed_point_of_two(alpha):
    """x1 - x2 = (b1 - b2) / (1 + 2 alpha), and the mean is that of b."""
    one, two = coupled(alpha, (1.0, 4.0), (0.0, 0.0), 800)[-1]
    assert one - two == pytest.approx(-3 / (1 + 2 * alpha), abs=1e-9)
    assert (one + two) / 2 == pytest.approx(2.5, abs=1e-9)


def test_the_mean_moves_as_if_alone_and_differences_decay_faster():
    free, bound = coupled(0.0, (1, 4), (9, 2), 30), coupled(2.0, (1, 4), (9, 2), 30)
    np.testing.assert_allclose(free.mean(1), bound.mean(1), rtol=1e-12)
    for alpha, history in ((0.0, free), (2.0, bound)):
        away = history[:, 0] - history[:, 1] + 3 / (1 + 2 * alpha)
        np.testing.assert_allclose(away[1:] / away[:-1], 1 - 0.05 * (1 + 2 * alpha), rtol=1e-9)


def test_the_fixed_point_of_three():
    """n ranks: (x_i - b_i) + alpha (x_i - mean of the others) = 0, so deviations from the mean
    shrink by 1 + alpha n / (n - 1)."""
    found = coupled(2.0, (0.0, 3.0, 9.0), (0, 0, 0), 800)[-1]
    np.testing.assert_allclose(found, 4 + (np.array([0, 3, 9]) - 4) / (1 + 2 * 3 / 2), atol=1e-9)


def test_identical_models_train_as_if_alone():
    free, bound = coupled(0.0, (1, 1), (9, 9), 30), coupled(2.0, (1, 1), (9, 9), 30)
    np.testing.assert_array_equal(free, bound)
