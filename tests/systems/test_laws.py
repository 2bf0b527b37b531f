"""The laws of every system, on NumPy's arrays: each is a row of the table."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from hvd_compress import codecs
from hvd_compress.codecs.base import Codec
from hvd_compress.codecs.floats import plain
from hvd_compress.config import from_config
from hvd_compress.errors import ConfigError, MismatchError
from hvd_compress.integrations.exports import SYSTEMS
from hvd_compress.systems import Ranks, graphs, rounds
from hvd_compress.systems.graphs import LEAD
from hvd_compress.systems.rounds import EASGD, LeaderSGD
from tests.systems.ranks import LR, NAMES, SHAPE, SIZE, Served, Trained
from tests.systems.table import GRAPHS, ROUNDS, SERVERS, TABLE, TEACHERS


def law(rows):
    return pytest.mark.parametrize("row", rows, ids=repr)


def plainly(ranks, x, steps):
    """Gradient descent on the mean of the ranks' functions."""
    for _ in range(steps):
        x = {
            n: own - LR * (own - np.mean([t[n] for t in ranks.targets], 0)) for n, own in x.items()
        }
    return x


def check_close(x, y, **options):
    for name in x:
        np.testing.assert_allclose(x[name], y[name], atol=1e-12, err_msg=name, **options)


def test_all_are_here():
    assert {type(row.method) for row in ROUNDS} >= {*rounds.METHODS.values()}
    assert {*rounds.METHODS, *graphs.METHODS} <= {*SYSTEMS}, "drop-ins would not have them"
    assert all(map(len, (GRAPHS, TEACHERS, SERVERS)))


@law(TABLE)
def test_options_survive_json(row):
    assert from_config(row.method.to_config()) == row.method


@law([row for row in TABLE if row.keeps_mean])
def test_the_mean_is_kept(row):
    """It moves as if the ranks were one, whatever they tell each other."""
    ranks = row.ranks(row.method).run(7)
    mean = {n: np.mean([own[n] for own in ranks.x], 0) for n in NAMES}
    check_close(mean, plainly(ranks, {n: np.zeros(SHAPE) for n in NAMES}, 7))


@law([row for row in TABLE if row.equal_after])
def test_ranks_are_equal_where_that_is_promised(row):
    ranks = row.ranks(row.method)
    for _ in range(3):
        ranks.run(int(row.equal_after))
        np.testing.assert_equal(ranks.x, [ranks.x[0]] * SIZE)


@law([row for row in TABLE if row.alone is not None])
def test_one_rank_trains_plainly(row):
    ranks = row.ranks(row.alone, 1).run(9)
    check_close(ranks.x[0], plainly(ranks, {n: np.zeros(SHAPE) for n in NAMES}, 9))
    if row.has_models:
        assert ranks.counted() == ([0], [0]), "there is nobody to learn from"


@law([row for row in TABLE if row.resumes])
@pytest.mark.parametrize("at", [3, 5])
def test_resumed_is_uninterrupted(row, at):
    whole, half = row.ranks(row.method).run(at + 8), row.ranks(row.method).run(at)
    again = half.resumed().run(8)
    np.testing.assert_equal(again.x, whole.x)


@law([row for row in TABLE if row.resumes])
def test_a_damaged_checkpoint_is_refused(row):
    """And nothing has changed."""
    ranks = row.ranks(row.method, 1) if row.alone is None else row.ranks(row.alone, 1)
    ranks.run(3)
    (owner,), (x,) = ranks.owners, ranks.x
    saved = owner.state_dict()
    nan = {key: dict.fromkeys(own, "?") for key, own in saved["state"].items()}
    for broken in (
        *({key: value for key, value in saved.items() if key != lost} for lost in saved),
        *({**saved, key: "?"} for key in saved if key != "consolidated"),
        {**saved, "version": 7},
        *([{**saved, "state": nan}] if nan else []),
    ):
        if broken.get("consolidated", 0) == "?":
            continue
        with pytest.raises(ConfigError):
            ranks.load(owner, broken, x)
    after = owner.state_dict()
    assert (after["step"], after["state"].keys()) == (3, saved["state"].keys())


@law(TABLE)
@pytest.mark.parametrize("after", [2, 3, 5])
def test_nan_on_a_rank_does_not_stay_there_without_a_word(row, after):
    """Either it is gone from all ranks, with a warning or a count, and training goes on; or all
    have it; or, where ranks have models of their own, the others go on without."""
    ranks = row.ranks(row.method).run(after)
    before = ranks.x[0]["a"].copy()
    ranks.spoil(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ranks.run(24)
    finite = [all(np.isfinite(x).all() for x in own.values()) for own in ranks.x]
    if row.has_models:
        assert finite == [rank != 1 for rank in range(SIZE)]
    else:
        assert len(set(finite)) == 1, finite
    if finite[0]:
        said = any("NaN or Inf" in str(each.message) for each in caught)
        assert said or ranks.sim.server.stats.non_finite == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ranks.run(8)
        assert (ranks.x[0]["a"] != before).all(), "training goes on"


@law(TABLE)
def test_frozen_parameters_stay(row):
    """The values of parameters when they are frozen; those of one model are equal.  Then they go
    on."""
    ranks = row.ranks(row.method).run(5)
    kept, before = ranks.freeze("b"), [own["a"].copy() for own in ranks.x]
    ranks.run(9)
    for own, still in zip(ranks.frozen(), kept, strict=True):
        np.testing.assert_array_equal(own["b"], still["b"])
        if not row.has_models:
            np.testing.assert_array_equal(own["b"], kept[0]["b"])
    assert all((own["a"] != x).all() for own, x in zip(ranks.x, before, strict=True))
    ranks.thaw()
    ranks.run(8)
    for own in ranks.x:
        assert np.isfinite(own["b"]).all()
        assert (own["b"] != kept[0]["b"]).all()


@law([row for row in TABLE if row.ranks is Trained])
def test_without_trained_parameters_nothing_happens(row):
    """All are frozen: from the beginning, or in the middle, and trained again."""
    assert Trained(row.method, names=()).run(9).x == [{}] * SIZE
    ranks = Trained(row.method, names=("a", "b")).run(5)
    ranks.freeze("a", "b")
    ranks.run(5)
    assert ranks.x == [{}] * SIZE
    ranks.thaw()
    ranks.run(5)
    assert [owner.step for owner in ranks.owners] == [15] * SIZE
    assert all(np.isfinite(own["a"]).all() for own in ranks.x)


@law([row for row in TABLE if row.ranks is Trained])
def test_ranks_that_begin_apart_are_told(row):
    """With methods that keep something in common from the beginning; others bring ranks together,
    or keep them apart as they mean to."""
    ranks = Trained(row.method, spread=1.0)
    if row.starts_equal:
        with pytest.raises(MismatchError, match=r"(?s)broadcast_parameters.* a \("):
            ranks.run(3)
    else:
        ranks.run(8)
    if not row.method.state_is_own:
        first, *others = (row.method.in_common(owner.state) for owner in ranks.owners)
        assert len(set(first)) == len(first)
        assert bool(first) == any(other != first for other in others)


@law([row for row in TABLE if row.starts_equal])
def test_ranks_that_loaded_states_that_differ_are_told(row):
    ranks = row.ranks(row.method).run(3)
    for owner, x in zip(ranks.owners, ranks.x, strict=True):
        ranks.load(owner, owner.state_dict(), x)
    for arrays in ranks.owners[1].state.values():
        for x in arrays.values():
            x += 1
    with pytest.raises(MismatchError, match="weights at the start"):
        ranks.run(8)


@law([row for row in TABLE if row.ranks is not Served])
def test_ranks_that_are_not_equally_far_are_told(row):
    ranks = row.ranks(row.method).run(8)
    ranks.owners[1].step += 12  # all periods are divisors
    with pytest.raises(MismatchError, match="step"):
        ranks.run(8)


@law(TABLE)
def test_bytes_are_exact(row):
    said, counted = row.ranks(row.method).run(9).counted()
    assert said == counted
    assert sum(said) > 0


@law([row for row in TABLE if row.ranks is Trained])
def test_what_is_tested_is_no_step(row):
    """Its bytes are counted, and steps and exchanges are not."""
    ranks = row.ranks(row.method).run(7)
    (before, _), steps = ranks.counted(), [owner.stats().total.steps for owner in ranks.owners]
    exchanges = [owner.exchanges for owner in ranks.owners]
    tested = ranks.tested()
    np.testing.assert_equal(tested, [tested[0]] * SIZE)
    said, counted = ranks.counted()
    assert said == counted
    # A centre is there already.
    assert said == before if isinstance(row.method, EASGD) else sum(said) > sum(before)
    assert [owner.stats().total.steps for owner in ranks.owners] == steps
    assert [owner.exchanges for owner in ranks.owners] == exchanges


@law([row for row in TABLE if row.ranks is Trained])
def test_ranks_in_one_process_have_the_bits_of_the_owners(row):
    ranks, world = Trained(row.method), Ranks(row.method, SIZE)
    x = [dict(own) for own in ranks.x]
    for _ in range(9):
        gradients = [
            {n: own[n] - target[n] for n in own}
            for own, target in zip(x, ranks.targets, strict=True)
        ]
        losses = [sum(float((g**2).sum()) for g in own.values()) for own in gradients]
        x = world.before_step(x, losses=losses, rates=dict.fromkeys(NAMES, LR))
        x = [
            {n: value - LR * g[n] for n, value in own.items()}
            for own, g in zip(x, gradients, strict=True)
        ]
        x = world.after_step(x)
    ranks.run(9)
    np.testing.assert_equal(x, ranks.x)
    assert [owner.exchanges for owner in ranks.owners] == [world.exchanges] * SIZE
    assert world.bytes_sent == ranks.counted()[0][0]


# -- of some ----------------------------------------------------------------------------------


@law(
    [row for row in ROUNDS if isinstance(row.method, LeaderSGD) and row.method.groups in (None, 1)]
)
def test_a_rank_that_leads_takes_plain_steps(row):
    """It is pulled neither to itself nor to what it was."""
    ranks = Trained(row.method, names=("a",))
    for step in range(1, 14):
        before = [own["a"] for own in ranks.x]
        ranks.run(1)
        if row.method.groups == 1 and step > 4:
            (r,) = (rank for rank, owner in enumerate(ranks.owners) if "leader" not in owner.state)
            plain_step = before[r] - LR * (before[r] - ranks.targets[r]["a"])
            np.testing.assert_array_equal(ranks.x[r]["a"], plain_step)


def _codecs():
    made = []
    for cls in vars(codecs).values():
        if isinstance(cls, type) and issubclass(cls, Codec) and cls is not Codec:
            try:
                made.append(cls())
            except TypeError:  # it has options without defaults
                continue
    return [plain(), *made, codecs.contraction(codecs.natural()), codecs.natural(biased=True)]


@pytest.mark.parametrize("codec", _codecs(), ids=repr)
def test_lead_refuses_biased_codecs(codec):
    """With the others it converges."""
    if not codec.unbiased and codec != plain():
        with pytest.raises(ConfigError, match="is biased, or not known to be unbiased"):
            LEAD("cycle", codec=codec)
        return
    ranks = Trained(LEAD("cycle", codec=codec, alpha=0.2, gamma=0.3), names=("a",)).run(300)
    solution = np.mean([target["a"] for target in ranks.targets], axis=0)
    np.testing.assert_allclose([own["a"] for own in ranks.x], [solution] * SIZE, atol=1e-2)
