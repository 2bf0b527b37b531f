"""Classes of operators, by hand and by their definitions; rates and step sizes of the theory."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from test_codecs import adversaries, random, through

from hvd_compress import (
    Context,
    StagedWarmup,
    adaptive_random,
    allgather,
    allreduce,
    bernoulli,
    chain,
    codecs,
    contraction,
    from_config,
    natural,
    natural_dithering,
    random_k,
    rounding,
    top_k,
    uniform_dithering,
)
from hvd_compress.errors import ConfigError
from hvd_compress.lockstep import World

F4, F8 = np.dtype("float32"), np.dtype("float64")

# -- selecting operators -----------------------------------------------------------------------

#: what is drawn at random, and how often it takes to see the mean
DRAWS = 200
SELECTING = {
    "top-k": allgather(top_k(0.3)),
    "random-k": allreduce(select=random_k(0.3)),
    "random-k-unbiased": allreduce(select=random_k(0.3), unbiased=True),
    "adaptive-random": allgather(adaptive_random()),
    "bernoulli": allgather(bernoulli(0.4)),
    "everything": allreduce(),
    "top-k-natural": allgather(top_k(0.3), natural()),
    "top-k-dithering": allgather(top_k(0.3), contraction(natural_dithering(4, None))),
    "top-k-rounding": allgather(top_k(0.3), rounding(3.0, biased=True)),
    "top-all-dithering": allgather(top_k(1.0), natural_dithering(4, None)),
    "adaptive-natural": allgather(adaptive_random(), natural()),
    "bernoulli-coarse": allgather(bernoulli(0.4), contraction(uniform_dithering(1, None))),
    "dithering": allgather(natural_dithering(4, None)),
}


def arrived(via, x, draws):
    """(draws, n): what one rank's message says, a row a step."""
    world = World(chain(via=via), 1)
    return np.stack([world.exchange([x])[0].mean for _ in range(draws)])


def check_constants(classes, found, x, scaled=False):
    """B1, B2, B3 and U by their definitions; means within five standard deviations."""
    alpha, beta, gamma, _, zeta = classes
    square = x @ x

    def mean(values):
        slack = 5 * values.std() / np.sqrt(len(values))
        return values.mean() - slack, values.mean() + slack

    least_energy, most_energy = mean((found**2).sum(1))
    least_product, most_product = mean(found @ x)
    least_error, _ = mean(((found - x) ** 2).sum(1))
    near = 1 + 1e-6
    assert alpha * square <= most_energy * near
    assert least_energy <= beta * most_product * near
    assert gamma * square <= most_product * near
    if zeta is not None:
        assert least_energy <= zeta * square * near
        assert least_product <= square * near
        assert square <= most_product * near
    if classes.own_delta is not None:
        assert least_error <= (1 - 1 / classes.own_delta + 1e-6) * square


@pytest.mark.parametrize("via", SELECTING.values(), ids=SELECTING)
@pytest.mark.parametrize("d", [1, 13])
def test_constants_of_selecting_operators_hold(via, d):
    for x in adversaries(d):
        certain = via in (SELECTING["top-k"], SELECTING["top-k-rounding"], SELECTING["everything"])
        check_constants(via.classes(d), arrived(via, x, 1 if certain else DRAWS), x)


@pytest.mark.parametrize(
    "via", [SELECTING[key] for key in ("top-k", "random-k", "adaptive-random", "bernoulli")]
)
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
    assert adaptive_random().classes(5) == (1 / 5, 1, 1 / 5, 5, None)
    assert bernoulli((0.2, 0.9, 0.5)).classes(3) == (1 / 5, 1, 1 / 5, 5, None)
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
        with pytest.raises(NotImplementedError):
            via.classes(8)


def test_share_of_energy_of_random_vectors():
    """Beznosikov et al., section 5: the largest of d uniform elements has 3 / (d + 2) of the energy
    in the limit of means of quotients, and a random one 1/d; adaptive sampling is in between."""
    d, count = 20, 4000
    x = random(0).random((count, d))
    energy = (x**2).sum()
    assert (x.max(1) ** 2).sum() / energy == pytest.approx(3 / (d + 2), rel=0.02)
    world = World(chain(via=allgather(adaptive_random())), 1)
    kept = sum((world.exchange([row])[0].mean ** 2).sum() for row in x[:1500])
    expected = ((x[:1500] ** 3).sum(1) / x[:1500].sum(1)).sum()
    assert kept == pytest.approx(expected, rel=0.05)
    assert 1 / d < expected / (x[:1500] ** 2).sum() < 3 / (d + 2)


def test_adaptive_random_draws_in_proportion():
    x = np.array([1.0, 0, -3, 4])
    found = arrived(allgather(adaptive_random()), x, 2000)
    assert (np.count_nonzero(found, axis=1) == 1).all()
    hits = np.count_nonzero(found, axis=0) / 2000
    np.testing.assert_allclose(hits, [1 / 8, 0, 3 / 8, 1 / 2], atol=5 * 0.5 / np.sqrt(2000))
    np.testing.assert_allclose(np.abs(found).max(0), np.abs(x))
    world = World(chain(via=allgather(adaptive_random())), 3)
    chosen = [int(o.sent.indices[0]) for _ in range(9) for o in world.exchange([np.ones(50)] * 3)]
    assert len(set(chosen)) > 9, "ranks and steps draw for themselves"


@settings(max_examples=60)
@given(
    x=arrays(F8, st.integers(1, 9), elements=st.floats(allow_nan=True, allow_infinity=True)),
    step=st.integers(0, 99),
)
def test_adaptive_random_picks_an_element_that_matters(x, step):
    (i,) = adaptive_random().select(x, 1, Context(step=step))
    finite = np.isfinite(x).all()
    assert x[i] != 0 if finite and x.any() else i == 0 if finite else not np.isfinite(x[i])


def test_bernoulli_draws_with_its_probabilities():
    found = arrived(allgather(bernoulli((1, 0.2, 0.6))), np.array([2.0, -3, 1]), 2000)
    hits = np.count_nonzero(found, axis=0) / 2000
    np.testing.assert_allclose(hits, [1, 0.2, 0.6], atol=5 * 0.5 / np.sqrt(2000))
    assert found.min() == -3
    assert found.max() == 2


def test_codes_of_a_random_choice_draw_other_numbers_than_the_choice():
    """Or rounding would go up just where the choice did."""
    x = np.array([3.0, 3.0])
    found = arrived(allgather(bernoulli(0.5), natural()), x, 2000)
    chosen = found[found > 0]
    assert chosen.mean() == pytest.approx(3, abs=5 / np.sqrt(chosen.size))


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
        assert rounding(2.0, biased=biased).bits(10**4) == 9


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


@each_rounding
def test_rounding_travels_as_configuration(codec):
    assert from_config(codec.to_config()) == codec


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: rounding(1.0), "base"),
        (lambda: rounding(True), "base"),
        (lambda: rounding(levels=(1,)), "levels"),
        (lambda: rounding(levels=(1, 1)), "ascending"),
        (lambda: rounding(levels=(0, 1)), "positive"),
        (lambda: rounding(levels=(1, math.inf)), "range"),
        (lambda: rounding(biased=2), "biased"),
        (lambda: bernoulli(0), "probability"),
        (lambda: bernoulli((0.1, 2)), "probability"),
        (lambda: bernoulli(()), "probability"),
        (lambda: bernoulli((0.1, 0.2)).classes(3), "2 entries for a tensor of 3"),
        (
            lambda: World(chain(via=allgather(bernoulli((0.1, 0.2)))), 1).exchange([np.ones(3)]),
            "2 ent",
        ),
    ],
)
def test_bad_options(make, word):
    with pytest.raises(ConfigError, match=word):
        make()
