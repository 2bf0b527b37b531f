"""Classes of operators, by hand and by their definitions, and step sizes of the theory."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hvd_compress import EF21, Context, StagedWarmup, codecs
from hvd_compress.blocks import (
    allgather,
    allreduce,
    chain,
    contraction,
    error_feedback,
    gather_drawn,
    natural,
    natural_dithering,
    random_k,
    rounding,
    top_k,
    uniform_dithering,
)
from hvd_compress.engines.lockstep import World
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.studies.step_sizes import ef21_constants, ef21_step_size, kept_by_top_k
from tests.codecs.test_codecs import random, through
from tests.operator_classes import adversaries, check_constants

F4, F8 = np.dtype("float32"), np.dtype("float64")

# -- selecting operators -----------------------------------------------------------------------

#: what is drawn at random, and how often it takes to see the mean
DRAWS = 120
SELECTING = {
    "top-k": allgather(top_k(0.3)),
    "random-k": allreduce(select=random_k(0.3)),
    "random-k-unbiased": allreduce(select=random_k(0.3), unbiased=True),
    "own-draws": gather_drawn(random_k(0.3)),
    "own-draws-unbiased": gather_drawn(random_k(0.3), unbiased=True),
    "everything": allreduce(),
    "top-k-natural": allgather(top_k(0.3), natural()),
    "top-k-dithering": allgather(top_k(0.3), contraction(natural_dithering(4, None))),
    "top-k-rounding": allgather(top_k(0.3), rounding(3.0, biased=True)),
    "top-all-dithering": allgather(top_k(1.0), natural_dithering(4, None)),
    "dithering": allgather(natural_dithering(4, None)),
}


def arrived(via, x, draws):
    """(draws, n): what one rank's message says, a row a step."""
    world = World(chain(via=via), 1)
    return np.stack([world.exchange([x])[0].mean for _ in range(draws)])


@pytest.mark.parametrize("via", SELECTING.values(), ids=SELECTING)
@pytest.mark.parametrize("d", [1, 13])
def test_constants_of_selecting_operators_hold(via, d):
    for x in adversaries(d):
        certain = via in (SELECTING["top-k"], SELECTING["top-k-rounding"], SELECTING["everything"])
        check_constants(via.classes(d), arrived(via, x, 1 if certain else DRAWS), x)


@pytest.mark.parametrize("via", [SELECTING[key] for key in ("top-k", "random-k")])
def test_constants_of_selecting_operators_are_tight(via):
    """Elements of equal size: exactly the guaranteed share arrives."""
    x = np.ones(10)
    kept = (arrived(via, x, DRAWS) ** 2).sum(1)
    alpha = via.classes(10).alpha
    assert abs(kept.mean() - 10 * alpha) <= 5 * kept.std() / np.sqrt(DRAWS) + 1e-9


def test_constants_of_selecting_operators_by_hand():
    assert top_k(0.25).classes(8) == (1 / 4, 1, 1 / 4, 4, None)
    assert random_k(0.25).classes(8) == (1 / 4, 1, 1 / 4, 4, None)
    assert allreduce(select=random_k(0.25), unbiased=True).classes(8) == (4, 4, 1, 4, 4)
    schedule = StagedWarmup(densities=(0.5, 0.25))
    assert top_k(schedule).classes(8).delta == 2
    assert top_k(schedule).classes(8, Context(step=1)).delta == 4
    # Natural compression of the top 2 of 8: scaled by 8/9, B3(4 * 9/8); as it is, B3(4 * 8/7).
    assert allgather(top_k(0.25), natural()).classes(8) == pytest.approx(
        (1 / 4, 9 / 8, 1 / 4, 32 / 7, None), nan_ok=True
    )
    scaled = allgather(top_k(0.25), contraction(natural())).classes(8)
    assert scaled.delta == pytest.approx(4 * 9 / 8)
    # Dithering of k = 16 elements has zeta 9/8 + 1/4 whatever d is: see test_codecs.
    dithered = allgather(top_k(0.25), contraction(natural_dithering(4, None))).classes(64)
    assert dithered.delta == pytest.approx(4 * 11 / 8)
    assert allgather(top_k(0.25), natural_dithering(4, None)).classes(64)[:3] == pytest.approx(
        (1 / 4, 11 / 8, 1 / 4)
    )
    # zeta = 1 + min(d / 4, sqrt(d)) = 5: as it is no contraction.
    assert allgather(top_k(0.25), uniform_dithering(1, None)).classes(64).delta is None
    assert codecs.Classes.unbiased(1.5).own_delta == 2
    assert codecs.Classes.unbiased(2.0).own_delta is None


def test_what_has_no_constants_says_so():
    for via in (allgather(top_k(), "float16"), allreduce("float16")):
        with pytest.raises(UnsupportedError, match="constants"):
            via.classes(8)


# -- rounding ----------------------------------------------------------------------------------

LEVELS = (0.5, 1.0, 3.0, 4.0)
ROUNDING = [
    *(rounding(base, biased=biased) for base in (1.3, 2.0, 3.0, 10.0) for biased in (False, True)),
    rounding(levels=LEVELS),
    rounding(levels=LEVELS, biased=True),
]
each_rounding = pytest.mark.parametrize("codec", ROUNDING, ids=repr)


def test_rounding_by_hand():
    biased = rounding(levels=LEVELS, biased=True)
    x = [0, 0.2, -0.3, 0.7, -0.8, 2, 2.1, 3.5, 3.6, -9]
    np.testing.assert_array_equal(through(biased, x), [0, 0, -0.5, 0.5, -1, 1, 3, 3, 4, -4])
    found = through(rounding(levels=LEVELS), np.tile([2.5, -0.1, 4], 2000)).reshape(-1, 3)
    np.testing.assert_array_equal(
        [sorted(set(column)) for column in found.T[:2]], [[1, 3], [-0.5, 0]]
    )
    np.testing.assert_allclose(found.mean(0), [2.5, -0.1, 4], atol=5 / np.sqrt(2000))
    # Beyond the last level there is no unbiased answer.
    assert through(rounding(levels=LEVELS), [-4.1]).tolist() == [-math.inf]
    np.testing.assert_allclose(
        through(rounding(3.0, biased=True), [1, 1.9, 2.1, -80, 1e-3]), [1, 1, 3, -81, 3.0**-6]
    )


def test_base_two_is_natural_compression():
    x = random(0).standard_normal(500).astype(F4)
    np.testing.assert_array_equal(
        through(rounding(2.0, biased=True), x), through(natural(biased=True), x)
    )
    for biased in (False, True):
        assert rounding(2.0, biased=biased).classes(7) == natural(biased).classes(7)
        assert rounding(2.0, biased=biased).bits_per_element(10**4) == 9


def test_constants_of_rounding_by_hand():
    assert rounding(2.0, biased=True).classes(1) == (4 / 9, 4 / 3, 2 / 3, 9 / 8, None)
    assert rounding(3.0, biased=True).classes(1) == (1 / 4, 3 / 2, 1 / 2, 4 / 3, None)
    assert rounding(3.0).classes(1).zeta == (3 + 1 / 3 + 2) / 4
    # The widest gap is from 1 to 3, the same as to base 3.
    assert rounding(levels=LEVELS).classes(1).zeta == (3 + 1 / 3 + 2) / 4
    assert rounding(levels=LEVELS, biased=True).classes(1) == rounding(3.0, biased=True).classes(1)


@each_rounding
def test_constants_of_rounding_hold_and_are_tight(codec):
    """Over one gap after the other, and at the worst point in the widest."""
    levels = np.array(codec.levels or float(codec.base) ** np.arange(-3, 4))
    classes = codec.classes(1)
    draws = 1 if codec.biased else 400
    for low, high in itertools.pairwise(levels):
        for x in np.linspace(low, high, 9):
            found = through(codec, np.full(draws, x))[:, None]
            check_constants(classes, found, np.array([x]))
    gap = int((levels[1:] / levels[:-1]).argmax())
    low, high = levels[gap : gap + 2]
    if codec.biased:
        middle = (low + high) / 2  # rounded down here, and up a little later
        down, up = through(codec, [middle * (1 - 1e-6), middle * (1 + 1e-6)])
        near = {"rel": 1e-5}
        assert (down / middle) ** 2 == pytest.approx(classes.alpha, **near)
        assert up / middle == pytest.approx(classes.beta, **near)
        assert down / middle == pytest.approx(classes.gamma, **near)
        assert (1 - down / middle) ** 2 == pytest.approx(1 - 1 / classes.delta, **near)
    else:  # the second moment is x (low + high) - low high; the harmonic mean is the worst x
        x = 2 * low * high / (low + high)
        assert (x * (low + high) - low * high) / x**2 == pytest.approx(classes.zeta)
        found = through(codec, np.full(20000, x))
        assert (found**2).mean() / x**2 == pytest.approx(classes.zeta, rel=0.04)


@each_rounding
@pytest.mark.parametrize("dtype", [F4, F8], ids=str)
@settings(max_examples=20)
@given(data=st.data())
def test_rounding_takes_any_numbers(codec, dtype, data):
    x = data.draw(
        arrays(dtype, st.integers(0, 20), elements=st.floats(-(2.0**100), 2.0**100, width=32))
    )
    found = through(codec, x)
    assert not np.isnan(found).any()
    assert np.isfinite(found).all() or codec.levels == LEVELS
    assert (found[x == 0] == 0).all()
    assert (np.sign(found) * np.sign(x) >= 0).all()


def test_rounding_at_the_ends_of_float32():
    largest = np.finfo(F4).max
    assert through(rounding(2.0, biased=True), np.array([largest, 2e-39], F4)).tolist() == [
        2.0**127,
        0,
    ]
    found = {through(rounding(2.0), np.array([2.0**-127], F4), seed)[0] for seed in range(30)}
    assert found == {0, 2.0**-126}
    assert through(rounding(2.0), np.array([largest, 1e39])).tolist() == [math.inf] * 2


@each_rounding
def test_rounding_decodes_whatever_comes(codec):
    code = random(1).integers(0, 256, codec.size(40, F4), dtype=np.uint8)
    assert codec.decode(code, 40, F4).size == 40


# -- EF21 --------------------------------------------------------------------------------------


def test_ef21_by_hand():
    """Top-1 of three elements, one rank: what is sent is added up, and never taken back."""
    world = World(EF21(density=1 / 3), 1)
    steps = [
        ([3, 1, -2], [3, 0, 0]),  # sends the 3
        ([3, 1, -2], [3, 0, -2]),  # difference (0, 1, -2)
        ([3, 1, -2], [3, 1, -2]),  # (0, 1, 0): now exact
        ([1, 2, -2], [1, 1, -2]),  # (-2, 1, 0)
        ([1, 2, -2], [1, 2, -2]),
    ]
    for gradient, expected in steps:
        (outcome,) = world.exchange([np.array(gradient, F8)])
        assert outcome.direction.tolist() == expected
        assert outcome.state["estimate"].tolist() == expected
        assert outcome.state["mean_estimate"].tolist() == expected
    assert outcome.mean.tolist() == [0, 1, 0], "what was sent"


def test_ef21_from_the_gradients_themselves():
    world = World(EF21(density=1 / 3, start=1), 2)
    gradients = [np.array([3.0, 1, -2]), np.array([1.0, 1, 0])]
    assert world.exchange(gradients)[0].direction.tolist() == [2, 1, -1]
    # The ranks' differences are (0, 0, 4) and (-2, 1, 0).
    outcome = world.exchange([np.array([3.0, 1, 2]), np.array([-1.0, 2, 0])])[1]
    assert outcome.direction.tolist() == [1, 1, 1]
    assert outcome.state["estimate"].tolist() == [-1, 1, 0]


def test_ef21_of_a_moving_average():
    world = World(EF21(density=1.0, average=0.5), 1)
    directions = [world.exchange([np.array([x])])[0].direction.tolist() for x in (4.0, 8.0, 0.0)]
    assert directions == [[2], [5], [2.5]]


@pytest.mark.parametrize("values", ["float32", "float16", natural(), rounding(3.0, biased=True)])
def test_the_mean_estimate_is_the_mean_of_the_estimates(values):
    world = World(EF21(density=0.2, values=values), 3)
    numbers = random(0)
    for _ in range(30):
        outcomes = world.exchange(list(numbers.standard_normal((3, 40))))
        states = [outcome.state for outcome in outcomes]
        mean = np.mean([state["estimate"] for state in states], axis=0)
        np.testing.assert_allclose(states[0]["mean_estimate"], mean, atol=1e-12)
        np.testing.assert_array_equal(outcomes[0].direction, states[2]["mean_estimate"])
    assert world.compressor.per_rank(np.zeros(3)) == {"estimate"}


def test_what_comes_back_is_the_callers():
    world = World(EF21(density=1.0), 1)
    world.exchange([np.ones(2)])[0].direction[:] = 7
    assert world.exchange([np.ones(2)])[0].direction.tolist() == [1, 1]


def test_step_sizes_of_ef21_by_hand():
    """alpha = 1/3: sqrt(2/3) = .8164966."""
    theta, beta = ef21_constants(3)
    assert theta == pytest.approx(0.183503, abs=1e-6)
    assert beta == pytest.approx(3.632993, abs=1e-6)
    assert math.sqrt(beta / theta) == pytest.approx(4.449490, abs=1e-6)
    assert ef21_step_size(3, 2.0) == pytest.approx(1 / (2 + 2 * 4.449490))
    assert ef21_step_size(3, 2.0, 5.0) == pytest.approx(1 / (2 + 5 * 4.449490))
    assert ef21_step_size(3, 2.0, 5.0, mu=0.1) == pytest.approx(
        1 / (2 + 5 * math.sqrt(2) * 4.449490), abs=1e-8
    )
    assert ef21_step_size(3, 0.01, mu=1.0) == pytest.approx(0.183503 / 2, abs=1e-6)
    # Everything is sent: gradient descent.
    assert ef21_constants(1) == (1, 0)
    assert ef21_step_size(1, 4.0) == 1 / 4
    with pytest.raises(ConfigError, match="delta"):
        ef21_step_size(0.5, 1.0)


# -- several nodes: divergence, and what mends it ----------------------------------------------

#: f_i(x) = <a_i, x>^2 + |x|^2 / 4
ROWS_A = np.array([[-3.0, 2, 2], [2, -3, 2], [2, 2, -3]])
TOP_1 = allgather(top_k(1 / 3))


def gradients_at(x):
    return list(2 * (ROWS_A @ x)[:, None] * ROWS_A + x / 2)


def train(method, rate, steps, x):
    """Iterates of x - rate * direction; float32 values travel, whose error is fed back too."""
    world, path = World(method, 3), [x]
    for _ in range(steps):
        x = x - rate * world.exchange(gradients_at(x))[0].direction
        path.append(x)
    return np.array(path)


def test_the_example_of_divergence():
    """Every f_i is strongly convex, and Top-1 goes uphill at any step size."""
    np.testing.assert_allclose(gradients_at(np.ones(3))[0], np.array([-11, 9, 9]) / 2)
    hessian = np.mean([2 * np.outer(a, a) + np.eye(3) / 2 for a in ROWS_A], axis=0)
    np.testing.assert_allclose(np.linalg.eigvalsh(hessian), [7 / 6, 103 / 6, 103 / 6])
    for rate in (0.05, 0.005):
        path = train(chain(via=TOP_1), rate, 30, np.ones(3))
        expected = (1 + 11 * rate / 6) ** np.arange(31)
        np.testing.assert_allclose(path, np.tile(expected[:, None], 3), rtol=1e-5)
    path = train(chain(via=TOP_1), 0.05, 3, np.ones(3))
    np.testing.assert_allclose(path[1:, 0], [1.0916667, 1.1917361, 1.3009786], rtol=1e-6)


@pytest.mark.parametrize(
    ("method", "rate", "norm"),
    [
        (chain(error_feedback(), via=TOP_1), 0.005, 4.93e-3),
        (chain(error_feedback(), via=TOP_1), 0.05, 2.7e-32),
        (EF21(density=1 / 3, start=1), 0.005, 4.82e-3),
        (EF21(density=1 / 3, start=1), 0.02, 5.83e-11),
    ],
    ids=lambda value: value.transforms[0].name if getattr(value, "transforms", ()) else str(value),
)
def test_feedback_mends_it(method, rate, norm):
    path = train(method, rate, 1000, np.ones(3))
    assert np.linalg.norm(path[-1]) == pytest.approx(norm, rel=0.02)


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 1.0])
def test_what_top_k_keeps_of_inputs_as_they_are(density):
    random, n = np.random.default_rng(0), 400_000
    inputs = {
        "normal": random.standard_normal(n),
        "exponential": random.standard_exponential(n),
        "uniform": random.uniform(-1, 1, n),
    }
    for name, x in inputs.items():
        world = World(chain(via=allgather(top_k(density))), 1)
        kept = (world.exchange([x])[0].mean ** 2).sum() / (x @ x)
        assert kept_by_top_k(density, name) == pytest.approx(kept, rel=0.03)
        assert kept_by_top_k(density, name) > 0.999 * density  # the worst case
    with pytest.raises(ConfigError, match="inputs"):
        kept_by_top_k(density, "cauchy")
