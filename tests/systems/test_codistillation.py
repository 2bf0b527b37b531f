"""Codistillation in NumPy and lockstep: its losses, schedules, exchanges and laws."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hvd_compress import from_config
from hvd_compress.engines import lockstep
from hvd_compress.errors import ConfigError
from hvd_compress.systems.base import groups_of
from hvd_compress.systems.counterparts import Counterparts, exchange, fingerprint_of
from hvd_compress.systems.distillation import LOSSES, log_softmax, target
from hvd_compress.systems.teachers import (
    Codistillation,
    Ramp,
    WeightDecay,
)

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
    for name in LOSSES:
        assert loss(name, q, q) == pytest.approx(0.0, abs=1e-15)


def test_certain_teachers():
    """A probability that is 0 contributes nothing."""
    certain, z = np.array([[0.0, -2000.0]]), logits(0.25, 0.75)
    assert loss("kl", z, certain) == pytest.approx(np.log(4))


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
    decay = WeightDecay((0.5, 0.25, 0.0), at_steps=(2, 4))
    assert [decay.at(step) for step in range(1, 7)] == [0.5, 0.5, 0.25, 0.25, 0.0, 0.0]
    assert Codistillation().period == 50
    assert Codistillation("predictions").period == 1


def test_bad_schedules_are_refused():
    for make, words in (
        (lambda: WeightDecay((1.0, 0.0), at_steps=(0,)), "at_steps"),
        (lambda: WeightDecay(), "at_steps"),
        (lambda: WeightDecay((0.1, 0.2, 0.3), (5, 4)), "ascending"),
        (lambda: WeightDecay((0.1, -1.0), (5,)), "values"),
    ):
        with pytest.raises(ConfigError, match=words):
            make()


def test_options_survive_json_and_repr():
    for method in (
        Codistillation(),
        Codistillation("predictions", weight=Ramp(0.5, 7), groups=2),
        Codistillation(weight_decay=WeightDecay([0.1, 0.0], at_steps=[7])),
        Codistillation(groups=2, values="float16", every=5),
    ):
        assert from_config(json.loads(json.dumps(method.to_config()))) == method
        assert eval(repr(method)) == method


# -- who with whom --------------------------------------------------------------------------------


def test_without_groups_all_teach_all():
    assert Codistillation().counterparts(1, 3) == Counterparts((0, 2), (0, 2))
    assert Codistillation().counterparts(0, 1) == Counterparts((), ())


def test_groups_exchange_place_by_place():
    method = Codistillation(groups=2)
    assert method.counterparts(1, 4) == Counterparts((3,), (3,))
    uneven = Codistillation(groups=3)
    assert uneven.counterparts(0, 5) == Counterparts((3,), (3,))
    assert uneven.counterparts(2, 5) == Counterparts((3,), ())
    assert uneven.counterparts(3, 5) == Counterparts((0,), (0, 2))


@pytest.mark.parametrize("groups", [None, 1, 2, 3, 4])
def test_targets_are_those_who_wait(groups):
    method = Codistillation(groups=groups)
    peers = [method.counterparts(rank, 6) for rank in range(6)]
    for rank, own in enumerate(peers):
        assert all(rank in peers[source].targets for source in own.sources)
        assert all(rank in peers[target].sources for target in own.targets)
        assert len(own.sources) == len(groups_of(groups or 1, 6)) - 1


def test_groups_that_cannot_be():
    with pytest.raises(ConfigError, match="differ in size"):
        Codistillation("predictions", groups=2).counterparts(0, 5)


# -- messages -------------------------------------------------------------------------------------


def exchanged(own, groups=None, values=None):
    size, method = len(own), Codistillation(groups=groups)
    peers = [method.counterparts(rank, size) for rank in range(size)]
    return lockstep.run([exchange(own[rank], peers[rank], values) for rank in range(size)])


def test_fingerprints_are_those_of_values():
    a, b = np.arange(3.0), np.arange(3.0) + 1
    assert fingerprint_of([a]) == fingerprint_of([a.copy()]) != fingerprint_of([b])
    assert fingerprint_of([a[::2]]) == fingerprint_of([np.array([0.0, 2.0])])
    assert fingerprint_of([]) == "unknown"


def test_integers_are_no_predictions():
    with pytest.raises(ConfigError, match="must be floats; got int64"):
        exchanged([{"x": np.zeros(2, int)}] * 2)


@pytest.mark.parametrize("values", [None, "float16"])
def test_arrays_arrive_whole(values):
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
    found = exchanged(own, 3, values)
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
    view, x = LOSSES["mse"].view, [np.array([value], float) for value in start]
    history = [np.concatenate(x)]
    for _ in range(steps):
        found = exchanged([{"x": own} for own in x])
        for rank, teachers in enumerate(found):
            mean = target(view, [arrays["x"] for arrays in teachers])
            x[rank] = x[rank] - lr * (x[rank] - b[rank] + alpha * (x[rank] - mean))
        history.append(np.concatenate(x))
    return np.array(history)


def test_differences_decay_faster_than_alone():
    free, bound = coupled(0.0, (1, 4), (9, 2), 30), coupled(2.0, (1, 4), (9, 2), 30)
    for alpha, history in ((0.0, free), (2.0, bound)):
        away = history[:, 0] - history[:, 1] + 3 / (1 + 2 * alpha)
        np.testing.assert_allclose(away[1:] / away[:-1], 1 - 0.05 * (1 + 2 * alpha), rtol=1e-9)


@pytest.mark.parametrize("alpha", [0.0, 2.0])
def test_the_fixed_point_of_three(alpha):
    """n ranks: (x_i - b_i) + alpha (x_i - mean of the others) = 0, so deviations from the mean
    shrink by 1 + alpha n / (n - 1)."""
    found = coupled(alpha, (0.0, 3.0, 9.0), (0, 0, 0), 800)[-1]
    expected = 4 + (np.array([0, 3, 9]) - 4) / (1 + alpha * 3 / 2)
    np.testing.assert_allclose(found, expected, atol=1e-9)


def test_identical_models_train_as_if_alone():
    free, bound = coupled(0.0, (1, 1), (9, 9), 30), coupled(2.0, (1, 1), (9, 9), 30)
    np.testing.assert_array_equal(free, bound)
