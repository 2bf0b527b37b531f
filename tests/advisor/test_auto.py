"""``compression="auto"`` with ranks that are threads, and clocks that tests set."""

from __future__ import annotations

import json
import logging
import math

import numpy as np
import pytest

from hvd_compress import Auto, ConfigError, MismatchError, as_compressor, partition, switch
from hvd_compress.advisor import Network, auto, kept, meeting, step_of
from hvd_compress.engines.local import LocalEngine
from hvd_compress.errors import UnsupportedError
from hvd_compress.reduce import Reducer
from hvd_compress.systems.base import checked_compression
from tests.core.test_checkpoints import problem_of
from tests.mutations import mutations, same
from tests.systems.ranks import Meeting, ThreadEngine

SHAPES = {"a": (40, 30), "b": (30,), "c": (64, 20)}
QUICK = {"steps": 2}


@pytest.fixture(autouse=True)
def short_sums(monkeypatch):
    """On a clock that stands still none is long enough."""
    monkeypatch.setattr(meeting, "_LARGEST", 2**16)


class Ticking:
    """A clock that goes on by so many seconds whenever it is read."""

    def __init__(self, each: float) -> None:
        self.each, self.seconds = each, 0.0

    def __call__(self) -> float:
        self.seconds += self.each
        return self.seconds


class Ranks:
    """Reducers on threads."""

    def __init__(self, method, size=3, clocks=None, shapes=SHAPES):
        self.meeting, self.size, self.shapes = Meeting(size), size, shapes
        self.reducers = self.meeting.run(
            lambda rank: Reducer(method, ThreadEngine(self.meeting, rank), in_place=True)
        )
        for reducer, clock in zip(self.reducers, clocks or (), strict=False):
            reducer.clock.now = clock

    def meet(self, size, state=None):
        """Go on with so many ranks, of which new ones take over a state."""
        self.meeting, self.size = Meeting(size), size
        self.reducers = self.reducers[:size]
        for reducer in self.reducers:
            engine = reducer._shared
            engine.meeting, engine.size = self.meeting, size
        for rank in range(len(self.reducers), size):
            engine = ThreadEngine(self.meeting, rank)
            self.reducers.append(Reducer(self.reducers[0].compression, engine, in_place=True))
            self.reducers[-1].load_state_dict(state)
        for reducer in self.reducers:
            reducer.forget_plan()

    def gradients(self, rank, step, scale=1.0):
        random = np.random.default_rng((rank, step))
        return {
            n: (scale * random.standard_normal(s)).astype(np.float32)
            for n, s in self.shapes.items()
        }

    def run(self, steps, scale=1.0, spoil=()):
        def work(rank):
            found = []
            for _ in range(steps):
                reducer = self.reducers[rank]
                own = self.gradients(rank, reducer.step, scale)
                if rank in spoil:
                    own["a"][0, 0] = np.nan
                found.append({n: x.copy() for n, x in reducer.reduce(own).items()})
            return found

        first, *others = self.meeting.run(work)
        assert all(same(own, first) for own in others), "ranks differ"
        return self

    @property
    def choice(self):
        """The choice of all ranks, which have the same."""
        found = [reducer.choice.state() for reducer in self.reducers]
        assert all(x == found[0] for x in found), found
        return found[0]

    @property
    def method(self):
        """The method that was chosen; ``None`` before the choice."""
        return self.choice["method"] if self.choice["why"] else None

    def until_chosen(self, **options):
        self.run(auto.UNEVEN + QUICK["steps"] - 1, **options)
        assert self.method is None
        self.run(1, **options)
        assert self.method is not None
        return self


@pytest.fixture
def chosen(monkeypatch):
    """Make rank 0 choose so, without measuring methods."""
    return lambda text: monkeypatch.setattr(Auto, "choice", lambda *_: (text, f"{text} for a test"))


METHODS = ("none", "fp16", "linear", "topk:density=0.01", "powersgd:rank=2", "onebit")


@pytest.mark.parametrize("text", METHODS)
def test_from_then_on_steps_are_those_of_the_method(chosen, text):
    chosen(text)
    ranks, plain = Ranks(Auto(**QUICK)).until_chosen(), Ranks(text)
    assert ranks.method == text
    for reducer, own in zip(plain.reducers, ranks.reducers, strict=True):
        reducer.step = own.step
    for each in (ranks, plain):
        each.run(5)
    same_states(ranks, plain)


def same_states(ranks, others):
    for one, other in zip(ranks.reducers, others.reducers, strict=True):
        assert same(one.store.states, other.store.states)


def test_ranks_whose_clocks_differ_choose_alike(chosen, monkeypatch):
    asked = []
    monkeypatch.setattr(Auto, "choice", lambda *args: asked.append(args[3:]) or ("linear", "why"))
    clocks = [Ticking(1e-5), Ticking(10.0), Ticking(math.nan)]
    ranks = Ranks(Auto(**QUICK), clocks=clocks).until_chosen().run(4)
    assert ranks.method == "linear"
    ((network, backward),) = asked  # on one rank
    # The rank that took longest counts: each reading of its clock takes ten seconds.
    assert (network.ranks, network.hosts) == (3, 1)
    assert network.inner_latency >= 1
    assert backward >= 10


def test_a_slow_network(caplog):
    """By the clock of the exchanges: nothing else is slow here."""
    caplog.set_level(logging.INFO, "hvd_compress")
    shapes = {"a": (300, 400), "b": (400,)}
    slow = Ranks(Auto(**QUICK), 2, [Ticking(0.2)] * 2, shapes).until_chosen()
    assert slow.method == "fp16"
    (line,) = [r.getMessage() for r in caplog.records]
    assert line == f"auto: {slow.choice['why']}"
    assert line.startswith("auto: fp16, ")
    assert "with none (" in line
    assert "measured between 2 ranks on 1 host, " in line
    assert slow.reducers[0].stats().choice == slow.choice
    assert slow.reducers[0].stats().line().endswith("; auto: fp16")


X = {"a": np.ones((300, 400), np.float32)}
LARGE = {"a": np.ones((5000, 5111), np.float32)}  # as many elements as ResNet-50, almost


@pytest.mark.parametrize("network", [Network(16, 1e8), Network(2, 1e13, latency=0.0)])
def test_the_decision_is_the_advisors(network):
    """So what docs/advise.md says of its model holds for it."""
    best, why = Auto().choice(LARGE, X.values(), network, 0.1)
    pieces = kept("resnet50")
    seconds = {text: step_of(pieces[text], network, 0.1).whole for text in ("none", "fp16")}
    assert best == min(seconds, key=seconds.get)
    assert "rounds of" in why


def test_the_reason():
    best, why = Auto().choice(LARGE, X.values(), Network(16, 1e8), 0.01)
    assert best == "fp16"
    assert why.startswith("fp16, 7.")
    assert " s per step against 15." in why
    assert "(100 Mbit/s and rounds of 50 us measured between 16 ranks on 16 hosts, 10 ms" in why
    best, why = Auto().choice(LARGE, X.values(), Network(2, 1e13), 1.0)
    assert why.startswith(f"the network is not your bottleneck: {best} (")
    assert why.endswith(" of backward)")


def test_gradients_of_16_bits_are_sent_as_they_are():
    half = {"a": X["a"].astype(np.float16)}
    best, why = Auto().choice(half, half.values(), Network(16, 1e6), 0.0)
    assert best == "none"
    assert "too small" not in why


@pytest.mark.parametrize("scale", [1e-9, 1e6])
def test_gradients_that_do_not_fit_are_not_sent_in_16_bits(scale):
    ranks = Ranks(Auto(**QUICK), clocks=[Ticking(1.0) for _ in range(3)])
    assert ranks.until_chosen(scale=scale).method == "none"
    assert "too small or too large for fp16" in ranks.choice["why"]


def test_the_choice_waits_for_a_step_that_is_finite(chosen):
    chosen("topk:density=0.01")
    ranks = Ranks(Auto(**QUICK)).run(10, spoil=(1,))
    assert ranks.method is None
    assert ranks.run(3).method == "topk:density=0.01"


def test_one_rank_has_nothing_to_choose():
    reducer = Reducer("auto", LocalEngine())
    for _ in range(20):
        assert reducer.reduce({"a": np.ones(3, np.float32)})["a"].tolist() == [1, 1, 1]
    assert reducer.choice.state() == {"method": "none", "why": ""}


@pytest.mark.parametrize("shapes", [{}, {"a": (0,)}])
def test_no_elements_at_all(shapes):
    assert Ranks(Auto(**QUICK), shapes=shapes).run(10).method is None


def test_a_step_that_is_abandoned_is_not_timed():
    reducer, now = Reducer(Auto(**QUICK), LocalEngine()), [0.0]
    reducer.clock.now = lambda: now[0]
    reducer.poll()  # a gradient of the step is ready
    reducer.abandon()
    now[0] = 100.0
    reducer.poll()
    now[0] = 101.0
    reducer.choice.step_is_over(reducer.clock)
    assert reducer.choice.backward == [1.0]


def test_ranks_that_go_and_come_keep_the_choice(chosen):
    """As in an elastic run, whose new worker gets the state of another one."""
    chosen("linear")
    ranks = Ranks(Auto(**QUICK)).run(1)
    ranks.meet(2)
    ranks.until_chosen()  # steps of before do not count
    state = ranks.meeting.run(lambda r: ranks.reducers[r].state_dict(consolidate=False))[0]
    ranks.meet(3, state)
    assert ranks.run(3).method == "linear"


class TestCheckpoints:
    @pytest.fixture
    def trained(self, chosen):
        chosen("linear")
        return Ranks(Auto(**QUICK)).until_chosen().run(4)

    def test_the_choice_goes_on_without_measuring(self, trained, monkeypatch):
        states = trained.meeting.run(lambda r: trained.reducers[r].state_dict(consolidate=False))
        other = Ranks(Auto(**QUICK))
        for reducer, state in zip(other.reducers, states, strict=True):
            choice = json.loads(json.dumps(state["choice"]))
            reducer.load_state_dict({**state, "choice": choice})
        monkeypatch.setattr(auto, "measured_network", None)
        assert other.choice == trained.choice
        trained.run(5)
        other.run(5)
        same_states(trained, other)

    @pytest.fixture
    def saved(self, trained):
        (saved, *_) = trained.meeting.run(lambda r: trained.reducers[r].state_dict())
        return saved

    def test_other_ranks_models_and_options_go_on(self, saved):
        waits = saved["states"]["a"]["residual"]
        for other in (
            Ranks(Auto(**QUICK), size=2),
            Ranks(Auto(**QUICK), shapes={**SHAPES, "d": (500,)}),
            Ranks(Auto(steps=9)),
        ):
            for reducer in other.reducers:
                reducer.load_state_dict(saved)
                np.testing.assert_array_equal(reducer.store.states["a"]["residual"], waits)
            assert other.run(2).method == "linear"

    def test_a_rank_that_loads_alone_is_noticed(self, saved):
        other = Ranks(Auto(**QUICK))
        other.reducers[1].load_state_dict(saved)
        with pytest.raises(MismatchError, match="choice"):
            other.run(1)

    def test_damaged_choices_are_refused_whole_or_are_choices(self, saved):
        other, refused = Ranks(Auto(**QUICK)).reducers[0], 0
        choices = [("by hand", {"choice": {**saved["choice"], "method": x}}) for x in ("auto", 3)]
        choices.append(("no reason", {"choice": {**saved["choice"], "why": ""}}))
        for what, damaged in [*choices, *mutations({"choice": saved["choice"]}, 300)]:
            before = other.state_dict(consolidate=False)
            if problem := problem_of(lambda d=damaged: other.load_state_dict({**saved, **d})):
                refused += 1
                assert "nothing was changed" in problem, what
                assert same(other.state_dict(consolidate=False), before), what
            else:
                assert what not in ("by hand", "no reason"), damaged
        assert refused > 50


def test_options():
    assert as_compressor("auto") == Auto()
    assert as_compressor("auto:steps=3") == Auto(steps=3)
    with pytest.raises(ConfigError, match="steps"):
        Auto(steps=0)


def test_where_nothing_can_change_it_auto_is_refused():
    with pytest.raises(ConfigError, match="advise --measure"):
        checked_compression("auto")
    for composed in (lambda: partition(otherwise="auto"), lambda: switch("auto", "none", 5)):
        with pytest.raises(ConfigError, match="chooses for all tensors"):
            composed()
    with pytest.raises(ConfigError, match="leaves momentum to the optimizer"):
        Reducer("auto", LocalEngine(), momentum=0.9)
    for call in (
        lambda: Auto().init(np.ones(3)),
        lambda: Auto().per_rank(np.ones(3)),
        lambda: Auto().exchange(np.ones(3), {}, None),
    ):
        with pytest.raises(UnsupportedError, match="a Reducer replaces"):
            call()
