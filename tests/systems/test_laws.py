"""What holds for every training method, in NumPy and lockstep."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from hvd_compress import codecs
from hvd_compress.codecs.base import Codec
from hvd_compress.codecs.plain import plain
from hvd_compress.engines.local import LocalEngine
from hvd_compress.errors import ConfigError, MismatchError
from hvd_compress.systems import Coordinator, World, graphs
from hvd_compress.systems.graphs import LEAD, DecentralizedMethod, ExactDiffusion
from hvd_compress.systems.rounds import EAMSGD, EASGD, DiLoCo, LeaderSGD, LocalSGD, OuterSGD, SlowMo
from hvd_compress.systems.rounds.factories import METHODS

SIZE, LR = 4, 0.1
LEADERS = {"local_every": 2, "global_every": 4}
#: every class, with short periods
TABLE = (
    *(LocalSGD(sync_every=2, start=2), LocalSGD(sync_every=2, compression="topk:density=0.5")),
    SlowMo(sync_every=2, momentum=0.3),
    DiLoCo(sync_every=2),
    DiLoCo(OuterSGD(0.7, 0.5), sync_every=4, fragments=2, delay=1, mix=0.5),
    *(LeaderSGD(**LEADERS), LeaderSGD(**LEADERS, groups=2), LeaderSGD(**LEADERS, groups=1)),
    *(EASGD(sync_every=2), EASGD(sync_every=2, compression="topk:density=0.5")),
    EAMSGD(sync_every=2),
    *(
        cls()
        for cls in vars(graphs).values()
        if isinstance(cls, type)
        and issubclass(cls, DecentralizedMethod)
        and cls is not DecentralizedMethod
    ),
)
laws = pytest.mark.parametrize("method", TABLE, ids=repr)


class Ranks:
    """Each of them minimises |x - target|^2 / 2."""

    def __init__(self, method, names=("a", "b", "c"), spread=0.0, size=SIZE):
        random = np.random.default_rng(0)
        self.world, self.size = World(method, size), size
        self.targets = [{n: random.normal(size=5) for n in names} for _ in range(size)]
        self.x = [{n: np.full(5, spread * rank) for n in names} for rank in range(size)]

    def run(self, steps):
        for _ in range(steps):
            pairs = list(zip(self.x, self.targets, strict=True))
            # Each gradient depends on all parameters, as those of a network do.
            lost = [0 * sum(map(np.sum, own.values())) for own in self.x]
            gradients = [
                {n: own[n] - target[n] + zero for n in own}
                for (own, target), zero in zip(pairs, lost, strict=True)
            ]
            losses = [sum(float((g**2).sum()) for g in own.values()) for own in gradients]
            rates = dict.fromkeys(self.x[0], LR)
            pulled = self.world.before_step(self.x, losses=losses, rates=rates)
            stepped = [
                {n: x - LR * g[n] for n, x in own.items()}
                for own, g in zip(pulled, gradients, strict=True)
            ]
            self.x = self.world.after_step(stepped)
        return self

    def finite(self):
        return [all(np.isfinite(x).all() for x in own.values()) for own in self.x]


def test_all_are_here():
    assert {type(method) for method in TABLE} >= set(METHODS)
    assert ExactDiffusion in {type(method) for method in TABLE}


@laws
@pytest.mark.parametrize("after", [2, 3, 5])
def test_nan_on_a_rank_does_not_stay_there_without_a_word(method, after):
    """Either it is gone from all ranks, with a warning, and training goes on, or all have it."""
    ranks = Ranks(method).run(after)
    before = ranks.x[0]["a"].copy()
    ranks.x[1]["b"] = np.full(5, np.nan)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ranks.run(24)
    finite = ranks.finite()
    assert len(set(finite)) == 1, finite
    if finite[0]:
        assert any("NaN or Inf" in str(each.message) for each in caught)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ranks.run(8)
        assert (ranks.x[0]["a"] != before).all(), "training goes on"


@laws
def test_without_trained_parameters_nothing_happens(method):
    """All are frozen: from the beginning, or in the middle, and trained again."""
    assert Ranks(method, names=()).run(9).x == [{}] * SIZE
    # Alone: the graph of one rank has no edges.
    coordinator = Coordinator(_for_one(method), LocalEngine())
    x = {name: np.full(3, 2.0) for name in ("a", "b")}
    for step in range(15):
        own = {} if 5 <= step < 10 else x
        if step == 5:
            kept = coordinator.freeze(x)
        if method.loss_window:
            coordinator.report(1.0)
        own = coordinator.before_step(own, rates=dict.fromkeys(own, LR))
        own = coordinator.after_step({name: value - LR for name, value in own.items()})
        x = own or kept
    assert coordinator.step == 15
    assert all(np.isfinite(value).all() for value in x.values())


def _for_one(method):
    if isinstance(method, DecentralizedMethod):
        return type(method)("complete")
    return LeaderSGD(**LEADERS) if isinstance(method, LeaderSGD) else method


@laws
def test_ranks_that_begin_apart_are_told(method):
    """With methods that keep something in common from the beginning; others bring ranks together,
    or keep them apart as they mean to."""
    ranks = Ranks(method, spread=1.0)
    if isinstance(method, DiLoCo | SlowMo | EASGD) or "compression=TopK" in repr(method):
        with pytest.raises(MismatchError, match=r"(?s)broadcast_parameters.* a \("):
            ranks.run(1)
    else:
        ranks.run(8)
    if not method.state_is_own:
        first, *others = map(method.in_common, ranks.world.states)
        assert len(set(first)) == len(first)
        assert bool(first) == any(other != first for other in others)


@pytest.mark.parametrize(
    "method", [m for m in TABLE if isinstance(m, LeaderSGD) and m.groups != 2], ids=repr
)
def test_a_rank_that_leads_takes_plain_steps(method):
    """It is pulled neither to itself nor to what it was."""
    x, alone = np.zeros(5), Ranks(_for_one(method), names=("a",), size=1)
    target = alone.targets[0]["a"]
    for _ in range(13):
        alone.run(1)
        x = x - LR * (x - target)
    np.testing.assert_array_equal(alone.x[0]["a"], x)
    several = Ranks(method, names=("a",))
    for _ in range(13):
        before = [own["a"] for own in several.x]
        several.run(1)
        if method.groups == 1 and several.world.step > 4:
            leads = [rank for rank, own in enumerate(several.world.states) if "leader" not in own]
            assert len(leads) == 1
            (r,) = leads
            plain = before[r] - LR * (before[r] - several.targets[r]["a"])
            np.testing.assert_array_equal(several.x[r]["a"], plain)


def test_numbers_of_ranks_that_groups_do_not_fit_are_found_at_once():
    method = LeaderSGD(groups=[[0, 1], [2, 3]])
    for make in (lambda: World(method, 2), lambda: Coordinator(method, LocalEngine())):
        with pytest.raises(ConfigError, match="are not of"):
            make()


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
        words = "of one size" if codec.varies else "is biased, or not known to be unbiased"
        with pytest.raises(ConfigError, match=words):
            LEAD("cycle", codec=codec)
        return
    ranks = Ranks(LEAD("cycle", codec=codec, alpha=0.2, gamma=0.3), names=("a",)).run(300)
    solution = np.mean([target["a"] for target in ranks.targets], axis=0)
    np.testing.assert_allclose([own["a"] for own in ranks.x], [solution] * SIZE, atol=1e-2)
