"""Error feedback in units of the step: the virtual iterate, while the learning rate changes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from hvd_compress.blocks import (
    allgather,
    chain,
    error_feedback,
    natural,
    rounding,
    scaled_sign,
    top_k,
)
from hvd_compress.engines.local import LocalEngine
from hvd_compress.engines.lockstep import World
from hvd_compress.errors import ConfigError
from hvd_compress.reduce import Reducer
from hvd_compress.testing import check_laws

STEPS = error_feedback(units="step")
#: up, down, and none at all
RATES = (0.05, 0.05, 0.2, 0.01, 0.0, 0.0, 0.1, 1e-4, 0.3)
RANKS, N = 3, 40


def gradients(x):
    """The gradient of |A_i x - b_i|^2 / 2, a function of each rank."""
    random = np.random.default_rng(0)
    a = random.standard_normal((RANKS, N, N)) / np.sqrt(N)
    b = random.standard_normal((RANKS, N))
    return [a[i].T @ (a[i] @ x - b[i]) for i in range(RANKS)]


def iterates(method, rates=RATES):
    """x, mean(e) and mean gradient before each step, and the last x and mean(e)."""
    world, x, found = World(method, RANKS), np.ones(N), []
    for rate in rates:
        everyones = gradients(x)
        states = world.states.get("tensor", [{"residual": np.zeros(N)}])
        owed = np.mean([state["residual"] for state in states], axis=0)
        found.append((x, owed, np.mean(everyones, axis=0)))
        x = x - rate * world.exchange(everyones, learning_rate=rate)[0].mean
    owed = np.mean([state["residual"] for state in world.states["tensor"]], axis=0)
    return [*found, (x, owed, None)]


def leaves(method, rates=RATES):
    """How far the virtual iterate x - mean(e) ever is from where plain SGD would take it."""
    found = iterates(method, rates)
    return max(
        np.abs((x2 - e2) - (x - e - rate * g)).max()
        for (x, e, g), (x2, e2, _), rate in zip(found, found[1:], rates, strict=False)
    )


VIAS = [
    allgather(top_k(0.05)),
    allgather(rounding(levels=(0.5, 2.0, 8.0), biased=True)),  # not homogeneous
    allgather(natural(biased=True)),
    allgather(scaled_sign()),
]


@pytest.mark.parametrize("via", VIAS, ids=repr)
def test_the_virtual_iterate_takes_the_steps_of_sgd(via):
    assert leaves(chain(STEPS, via=via)) < 1e-13


def test_units_of_the_gradient_have_one_at_a_constant_rate_only():
    """There e is the rate times the residual."""
    method = chain(error_feedback(), via=VIAS[0])
    found = iterates(method, (0.1,) * 6)
    for (x, r, g), (x2, r2, _) in itertools.pairwise(found):
        np.testing.assert_allclose(x2 - 0.1 * r2, x - 0.1 * r - 0.1 * g, atol=1e-13)
    found = iterates(method, (0.1, 0.01))
    (x, r, g), (x2, r2, _) = found[1:]
    assert np.abs((x2 - 0.01 * r2) - (x - 0.1 * r - 0.01 * g)).max() > 1e-3


def test_it_is_the_algorithm_of_the_paper():
    """e' = e + rate g - C(e + rate g), x' = x - mean C(e + rate g), for top-k."""
    found = iterates(chain(STEPS, via=allgather(top_k(0.05))))
    x, e = np.ones(N), np.zeros((RANKS, N))
    for rate, (theirs, owed, _) in zip((*RATES, 0.0), found, strict=True):
        np.testing.assert_allclose(theirs, x, atol=1e-6)
        np.testing.assert_allclose(owed, e.mean(axis=0), atol=1e-6)  # float32 is sent
        if not rate:  # the paper would send what waits
            continue
        e = e + rate * np.array(gradients(x))
        sent = np.zeros_like(e)
        for own, out in zip(e, sent, strict=True):
            largest = np.argsort(-np.abs(own), kind="stable")[:2]
            out[largest] = own[largest]
        e, x = e - sent, x - sent.mean(axis=0)


def test_at_rate_one_it_is_error_feedback_bit_for_bit():
    worlds = [World(chain(f, via=VIAS[0]), 2) for f in (STEPS, error_feedback())]
    for step in range(5):
        random = np.random.default_rng(step)
        everyones = [random.standard_normal(100).astype("f4") for _ in range(2)]
        a, b = (w.exchange(everyones, learning_rate=1.0)[0] for w in worlds)
        assert a.mean.tobytes() == b.mean.tobytes()
        assert a.state["residual"].tobytes() == b.state["residual"].tobytes()


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_it_obeys_the_laws(make):
    """At rate 1, where what waits has the units of what was sent."""
    method = chain(STEPS, via=VIAS[0])
    shapes = ((), (7,), (33, 40))
    check_laws(method, make=make, sizes=(1, 3), shapes=shapes, learning_rate=1.0)


def test_a_reducer_is_told_the_rate():
    reducer, x = Reducer(chain(STEPS, via=allgather(top_k(0.25))), LocalEngine()), np.ones(4)
    with pytest.raises(ConfigError, match="learning_rate"):
        reducer.reduce({"w": x})
    reducer.learning_rate = 0.5
    reducer.reduce({"w": np.array([1.0, 2, 3, 4])})
    np.testing.assert_array_equal(reducer.store.states["w"]["residual"], [0.5, 1, 1.5, 0])
    reducer.learning_rate = 0.25
    direction = reducer.reduce({"w": np.zeros(4)})["w"]
    np.testing.assert_array_equal(direction, [0, 0, 6, 0])  # 6 * 0.25 is the step of 3 * 0.5
