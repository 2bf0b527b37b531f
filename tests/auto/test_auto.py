"""``compression="auto"`` with ranks that are threads, and clocks that tests set."""

from __future__ import annotations

import json
import logging
import math
import re

import numpy as np
import pytest

from hvd_compress import (
    Auto,
    ConfigError,
    MismatchError,
    TopK,
    as_compressor,
    from_config,
    partition,
    switch,
)
from hvd_compress.advisor import CANDIDATES, Network, choose
from hvd_compress.auto import choosing, meeting
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

    def __init__(self, auto, size=3, clocks=None, shapes=SHAPES):
        self.meeting, self.size, self.shapes = Meeting(size), size, shapes
        self.reducers = self.meeting.run(
            lambda rank: Reducer(auto, ThreadEngine(self.meeting, rank), in_place=True)
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
            self.reducers.append(Reducer(self.choosers[0].auto, engine, in_place=True))
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

        for step in zip(*self.meeting.run(work), strict=True):
            for averages in step[1:]:
                for name, x in averages.items():
                    assert x.tobytes() == step[0][name].tobytes(), "ranks differ"
        return self

    @property
    def choosers(self):
        return [reducer.chooser for reducer in self.reducers]

    @property
    def facts(self):
        """What all ranks have in common."""
        found = [chooser.state() for chooser in self.choosers]
        assert all(x == found[0] for x in found), found
        return found[0]

    @property
    def phase(self):
        return self.facts["phase"], self.facts["method"]

    def until(self, phase, most=60, **options):
        for _ in range(most):
            self.run(1, **options)
            if self.phase[0] == phase:
                return self
        raise AssertionError(self.facts)


@pytest.fixture
def chosen(monkeypatch):
    """Make rank 0 choose so, without measuring methods."""

    def choose_(text, predicted=()):
        seconds = {"none": 1.0, "fp16": 0.9, text: 0.1, **dict(predicted)}
        monkeypatch.setattr(
            choosing, "decided", lambda *_, **__: (text, f"{text} for a test", seconds)
        )

    return choose_


METHODS = [c.method for c in CANDIDATES if not c.method.startswith("dgc")]


@pytest.mark.parametrize("text", METHODS)
def test_from_then_on_steps_are_those_of_the_method(chosen, text):
    chosen(text)
    ranks = Ranks(Auto(methods=(text,), **QUICK)).until("using")
    assert ranks.phase == ("using", text)
    plain = Ranks(text)
    for reducer, own in zip(plain.reducers, ranks.reducers, strict=True):
        reducer.step = own.step
    for each in (ranks, plain):
        each.run(5)
    for one, other in zip(ranks.reducers, plain.reducers, strict=True):
        assert one.store.states.keys() == other.store.states.keys()
        for name, state in one.store.states.items():
            for key, x in state.items():
                assert x.tobytes() == other.store.states[name][key].tobytes()


def test_ranks_whose_clocks_differ_choose_alike():
    clocks = [Ticking(1e-5), Ticking(10.0), Ticking(math.nan)]
    ranks = Ranks(Auto(accuracy="feedback", **QUICK), clocks=clocks).until("using").run(4)
    assert ranks.facts["method"] in METHODS
    assert ranks.facts["ranks"] == 3
    # The rank that took longest counts: each reading of its clock takes ten seconds.
    assert ranks.facts["dense"] >= 10


def test_a_slow_network_and_a_fast_one(caplog):
    """By the clock of the exchanges: nothing else is slow here."""
    caplog.set_level(logging.INFO, "hvd_compress")
    shapes = {"a": (300, 400), "b": (400,)}
    slow = Ranks(Auto(accuracy="feedback", **QUICK), 2, [Ticking(0.2)] * 2, shapes).until("using")
    assert slow.phase[1] not in ("none", "fp16")
    (line,) = [r.getMessage() for r in caplog.records if "a step against" in r.getMessage()]
    assert line.startswith(f"auto: {slow.phase[1]}, ")
    assert "with fp16" in line
    assert "measured between 2 ranks on 1 host, " in line
    assert slow.reducers[0].stats().choice["method"] == slow.phase[1]
    json.dumps(slow.reducers[0].stats().as_dict())


def test_the_decision_is_the_advisors(monkeypatch):
    """So what docs/advise.md says of its choices holds for it."""
    asked = []

    def noted(*args, **options):
        asked.append(options)
        return choose(*args, **options)

    monkeypatch.setattr(choosing, "choose", noted)
    best, why, predicted = choosing.decided(
        Auto(accuracy="lossy").candidates,
        [],
        {"a": (300, 400)},
        Network(2, 1e8),
        0.01,
        half=False,
    )
    (options,) = asked
    assert [c.method for c in options["candidates"]] == METHODS
    assert predicted[best] <= min(predicted.values()) * 1.02
    assert "100 Mbit/s" in why


def test_the_reason_names_what_was_measured():
    network, methods = Network(16, 1e8), Auto().candidates
    best, why, predicted = choosing.decided(methods, [], {"a": (3000, 4000)}, network, 0.01, False)
    assert best == "fp16"
    assert set(predicted) == {"none", "fp16"}
    # Work is measured here, so digits behind the second may be others.
    assert re.match(
        r"fp16, 3\.\d+ s a step against 7\.\d+ s with none \(100 Mbit/s and rounds", why
    )
    best, why, _ = choosing.decided(
        methods, ["a note"], {"a": (300, 400)}, Network(2, 1e13), 1.0, half=False
    )
    assert why.startswith(f"the network is not your bottleneck: {best} (")
    assert why.endswith("; a note")


@pytest.mark.parametrize("scale", [1e-9, 1e6])
def test_gradients_that_do_not_fit_are_not_sent_in_16_bits(chosen, scale):
    ranks = Ranks(Auto(**QUICK), clocks=[Ticking(1.0) for _ in range(3)])
    assert ranks.until("using", scale=scale).phase == ("using", "none")
    assert "too small or too large for fp16" in ranks.facts["why"]


def test_steps_that_are_not_finite_are_not_measured(chosen):
    chosen("topk:density=0.01")
    ranks = Ranks(Auto(methods=("topk:density=0.01",), **QUICK)).run(10, spoil=(1,))
    assert ranks.phase == ("measuring", "none")
    assert ranks.until("using").run(3).phase == ("using", "topk:density=0.01")


def test_one_rank_has_nothing_to_choose():
    reducer = Reducer("auto", LocalEngine())
    for _ in range(20):
        assert reducer.reduce({"a": np.ones(3, np.float32)})["a"].tolist() == [1, 1, 1]
    assert reducer.chooser.state()["phase"] == "measuring"
    assert reducer.method.name == "none"


def test_no_tensors_at_all():
    ranks = Ranks(Auto(**QUICK), shapes={})
    assert ranks.run(10).phase == ("measuring", "none")
    empty = Ranks(Auto(**QUICK), shapes={"a": (0,)})
    assert empty.run(10).phase == ("measuring", "none")


def test_an_error_while_rank_0_measures_leaves_nobody_waiting(monkeypatch, caplog):
    def fails(*_, **__):
        raise MemoryError("no more")

    monkeypatch.setattr(choosing, "estimated", fails)
    ranks = Ranks(Auto(**QUICK)).until("using")
    assert ranks.phase == ("using", "none")
    assert "no more" in ranks.facts["why"]


def test_ranks_that_go_and_come_keep_the_choice(chosen):
    """As in an elastic run, whose new worker gets the state of another one."""
    chosen("linear")
    ranks = Ranks(Auto(methods=("linear",), **QUICK)).run(1)
    ranks.meet(2)
    assert ranks.until("using").facts["ranks"] == 2, "of before nothing counts"
    state = ranks.meeting.run(lambda r: ranks.reducers[r].state_dict(consolidate=False))[0]
    ranks.meet(3, state)
    assert ranks.run(3).phase == ("using", "linear")


class TestCheckpoints:
    @pytest.fixture
    def trained(self, chosen):
        chosen("linear")
        ranks = Ranks(Auto(methods=("linear",), **QUICK), clocks=[Ticking(0.0) for _ in "abc"])
        return ranks.until("using").run(4)

    def again(self, ranks, **options):
        return Ranks(
            Auto(methods=("linear",), **QUICK), clocks=[Ticking(0.0) for _ in "abc"], **options
        )

    def test_the_choice_goes_on_without_measuring(self, trained, monkeypatch):
        states = trained.meeting.run(
            lambda r: json_like(trained.reducers[r].state_dict(consolidate=False))
        )
        other = self.again(trained)
        for reducer, state in zip(other.reducers, states, strict=True):
            reducer.load_state_dict(state)
        monkeypatch.setattr(choosing, "measured_network", None)
        assert other.phase == ("using", "linear")
        assert other.facts == trained.facts
        trained.run(5)
        other.run(5)
        for own, there in zip(trained.reducers, other.reducers, strict=True):
            for name, state in own.store.states.items():
                for key, x in state.items():
                    assert x.tobytes() == there.store.states[name][key].tobytes()

    def test_other_ranks_models_and_options_go_on(self, trained):
        (saved, *_) = trained.meeting.run(lambda r: trained.reducers[r].state_dict())
        waits = saved["states"]["a"]["residual"]
        for other in (
            self.again(trained, size=2),
            self.again(trained, shapes={**SHAPES, "d": (500,)}),
            Ranks(Auto(**QUICK)),
        ):
            for reducer in other.reducers:
                reducer.load_state_dict(saved)
                np.testing.assert_array_equal(reducer.store.states["a"]["residual"], waits)
            assert other.run(2).phase == ("using", "linear")

    def test_a_rank_that_loads_alone_is_noticed(self, trained):
        (saved, *_) = trained.meeting.run(lambda r: trained.reducers[r].state_dict())
        other = self.again(trained)
        other.reducers[1].load_state_dict(saved)
        with pytest.raises(MismatchError, match="choice"):
            other.run(1)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("phase", "asleep"),
            ("method", "nonsense"),
            ("method", 3),
            ("method", "auto"),
            ("ranks", -1),
            ("why", None),
            ("predicted", {"none": -1.0}),
            ("bandwidth", float("nan")),
        ],
    )
    def test_a_damaged_choice_is_refused(self, trained, key, value):
        (saved, *_) = trained.meeting.run(lambda r: trained.reducers[r].state_dict())
        other = self.again(trained)
        before = other.choosers[0].state()
        saved["choice"] = {**saved["choice"], key: value}
        with pytest.raises(ConfigError, match="nothing was changed"):
            other.reducers[0].load_state_dict(saved)
        assert other.choosers[0].state() == before

    def test_damaged_choices_are_refused_whole_or_are_choices(self, trained):
        (saved, *_) = trained.meeting.run(lambda r: trained.reducers[r].state_dict())
        other, refused = self.again(trained).reducers[0], 0
        for what, damaged in mutations({"choice": saved["choice"]}, 300):
            before = other.state_dict(consolidate=False)
            if problem := problem_of(lambda d=damaged: other.load_state_dict({**saved, **d})):
                refused += 1
                assert "nothing was changed" in problem, what
                assert same(other.state_dict(consolidate=False), before), what
            json.dumps(other.stats().as_dict())
        assert refused > 50


def json_like(state):
    """What a file keeps of a state: the choice is plain values."""
    return {**state, "choice": json.loads(json.dumps(state["choice"]))}


def test_options():
    assert as_compressor("auto") == Auto()
    assert as_compressor("auto:accuracy=feedback,steps=3") == Auto(accuracy="feedback", steps=3)
    auto = Auto(methods=["topk:density=0.01", "fp16"])
    assert from_config(json.loads(json.dumps(auto.to_config()))) == auto
    assert [c.method for c in auto.candidates] == ["none", "fp16", "topk:density=0.01"]
    assert [c.method for c in Auto().candidates] == ["none", "fp16"]
    for wrong, words in (
        ({"accuracy": "best"}, "accuracy"),
        ({"methods": ("dgc",)}, "takes over the optimizer's momentum"),
        ({"methods": ("onebit_adam",)}, "momentum"),
        ({"methods": ("auto",)}, "none of the methods"),
        ({"methods": (TopK(),)}, "texts"),
        ({"methods": "topk"}, "a list"),
        ({"steps": 0}, "steps"),
    ):
        with pytest.raises(ConfigError, match=words):
            Auto(**wrong)


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
        with pytest.raises(UnsupportedError, match="a Reducer puts"):
            call()
