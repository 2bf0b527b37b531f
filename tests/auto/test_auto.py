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
from hvd_compress.auto import choosing, meeting, pilot
from hvd_compress.engines.local import LocalEngine
from hvd_compress.errors import UnsupportedError
from hvd_compress.reduce import Reducer
from hvd_compress.systems.base import checked_compression
from tests.core.test_checkpoints import problem_of
from tests.mutations import mutations, same
from tests.systems.ranks import Meeting, ThreadEngine

SHAPES = {"a": (40, 30), "b": (30,), "c": (64, 20)}
QUICK = {"steps": 2, "check": 20}
#: of the first look at a choice, counted from it
LOOK = pilot._UNEVEN + pilot._WINDOW


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
    """Reducers on threads; of every step all averages and what every rank has given are kept."""

    def __init__(self, auto, size=3, clocks=None, shapes=SHAPES):
        self.meeting, self.size, self.shapes = Meeting(size), size, shapes
        self.reducers = self.meeting.run(
            lambda rank: Reducer(auto, ThreadEngine(self.meeting, rank), in_place=True)
        )
        for reducer, clock in zip(self.reducers, clocks or (), strict=False):
            reducer.clock.now = clock
        self.given = {name: np.zeros(shape) for name, shape in shapes.items()}
        self.came = {name: np.zeros(shape) for name, shape in shapes.items()}

    def meet(self, size, state=None):
        """Go on with so many ranks, of which new ones take over a state."""
        self.meeting, self.size = Meeting(size), size
        self.reducers = self.reducers[:size]
        for reducer in self.reducers:
            engine = reducer._shared
            engine.meeting, engine.size = self.meeting, size
        for rank in range(len(self.reducers), size):
            engine = ThreadEngine(self.meeting, rank)
            self.reducers.append(Reducer(self.pilots[0].auto, engine, in_place=True))
            self.reducers[-1].load_state_dict(state)
        for reducer in self.reducers:
            reducer.forget_plan()

    def gradients(self, rank, step, scale=1.0):
        random = np.random.default_rng((rank, step))
        return {
            n: (scale * random.standard_normal(s)).astype(np.float32)
            for n, s in self.shapes.items()
        }

    def run(self, steps, scale=1.0, spoil=(), only=None):
        def work(rank):
            found = []
            for _ in range(steps):
                reducer = self.reducers[rank]
                own = self.gradients(rank, reducer.step, scale)
                own = {n: x for n, x in own.items() if only is None or n in only}
                if rank in spoil:
                    own["a"][0, 0] = np.nan
                before = {n: x.copy() for n, x in own.items()}
                found.append((before, {n: x.copy() for n, x in reducer.reduce(own).items()}))
            return found

        everyone = self.meeting.run(work)
        for step in zip(*everyone, strict=True):
            for name in step[0][0]:
                for _, averages in step[1:]:
                    assert averages[name].tobytes() == step[0][1][name].tobytes(), "ranks differ"
                if np.isfinite(step[0][1][name]).all():
                    self.given[name] += sum(before[name] for before, _ in step) / self.size
                    self.came[name] += step[0][1][name]
        return self

    @property
    def pilots(self):
        return [reducer.pilot for reducer in self.reducers]

    def the(self, what):
        """What all ranks have in common."""
        found = [what(each) for each in self.pilots]
        assert all(x == found[0] for x in found), found
        return found[0]

    @property
    def phase(self):
        return self.the(lambda p: (p.phase, p.chosen))

    def until(self, phase, most=60, **options):
        for _ in range(most):
            self.run(1, **options)
            if self.phase[0] == phase:
                return self
        raise AssertionError(self.pilots[0].facts())

    def slow(self):
        """All exchanges take longer from now on than any that was measured."""
        for reducer in self.reducers:
            reducer.clock.now = Ticking(1.0)

    def waits(self):
        return {
            name: sum(reducer.waiting().get(name, np.zeros(1)) for reducer in self.reducers)
            for name in self.shapes
        }

    def nothing_is_lost(self):
        for name, shape in self.shapes.items():
            waits = np.broadcast_to(self.waits()[name], math.prod(shape)).reshape(shape)
            np.testing.assert_allclose(
                self.came[name] + waits / self.size, self.given[name], atol=1e-3
            )


@pytest.fixture
def chosen(monkeypatch):
    """Make rank 0 choose so, without measuring methods."""

    def choose_(text, predicted=()):
        seconds = {"none": 1.0, "fp16": 0.9, text: 0.1, **dict(predicted)}
        monkeypatch.setattr(
            pilot, "decided", lambda *_, **__: (text, f"{text} for a test", seconds)
        )

    return choose_


METHODS = [c.method for c in CANDIDATES if not c.method.startswith("dgc")]


@pytest.mark.parametrize("text", METHODS)
def test_nothing_is_lost_on_the_way_there_and_back(chosen, text):
    chosen(text)
    auto = Auto(methods=(text,), **QUICK)
    ranks = Ranks(auto, clocks=[Ticking(0.0) for _ in range(3)]).until("using")
    assert ranks.phase == ("using", text)
    ranks.run(5)
    ranks.slow()
    if text == "none":
        assert ranks.run(LOOK).phase == ("using", "none")
        return
    for _ in range(30):
        if ranks.run(1).phase[1] == "none":
            break
    while ranks.phase[0] == "flushing":
        ranks.run(1)
    assert ranks.phase == ("using", "none")
    assert ranks.the(lambda p: text in p.struck)
    assert not any(np.any(x) for x in ranks.waits().values())
    if text != "qsgd":  # which loses what it rounds
        tolerance = 0.02 if text == "fp16" else 1e-3
        for name, came in ranks.came.items():
            np.testing.assert_allclose(came, ranks.given[name], atol=tolerance)
    assert all(not reducer.store.states.get("a") for reducer in ranks.reducers)
    ranks.run(30)
    assert ranks.phase == ("using", "none")


def test_what_waits_is_never_lost_meanwhile(chosen):
    chosen("topk:density=0.01")
    ranks = Ranks(
        Auto(methods=("topk:density=0.01",), **QUICK), clocks=[Ticking(0.0) for _ in "abc"]
    )
    for _ in range(30):
        ranks.run(1).nothing_is_lost()
    assert ranks.phase == ("using", "topk:density=0.01")


def test_ranks_whose_clocks_differ_choose_alike():
    clocks = [Ticking(1e-5), Ticking(10.0), Ticking(math.nan)]
    ranks = Ranks(Auto(accuracy="feedback", **QUICK), clocks=clocks).until("using")
    ranks.run(LOOK + 30)
    facts = ranks.the(lambda p: p.facts())
    assert facts["method"] in METHODS
    assert facts["ranks"] == 3
    # The rank that took longest counts: each reading of its clock takes ten seconds.
    assert facts["dense"] >= 10


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
    network = Network(2, 1e8)
    x = np.ones((300, 400), np.float32)
    auto = Auto(accuracy="lossy")
    best, why, predicted = choosing.decided(
        auto, {"a": (300, 400)}, network, backward=0.01, like=x, fits=True, half=False
    )
    (options,) = asked
    assert [c.method for c in options["candidates"]] == METHODS
    assert predicted[best] <= min(predicted.values()) * 1.02
    assert "100 Mbit/s" in why


def test_exact_says_what_more_could_be_gained():
    network, x = Network(16, 1e8), np.ones((300, 400), np.float32)
    best, why, predicted = choosing.decided(
        Auto(), {"a": (3000, 4000)}, network, backward=0.01, like=x, fits=True, half=False
    )
    assert best == "fp16"
    assert set(predicted) == {"none", "fp16"}
    # Work is measured here, so digits behind the second may be others.
    assert re.match(
        r"fp16, 3\.\d+ s a step against 7\.\d+ s with none \(100 Mbit/s and rounds", why
    )
    assert re.search('"auto:accuracy=measured" could choose linear with some [0-9.]+ m?s', why)
    best, why, _ = choosing.decided(
        Auto(), {"a": (300, 400)}, Network(2, 1e13), backward=1.0, like=x, fits=True, half=False
    )
    assert why.startswith(f"the network is not your bottleneck: {best} (")
    best, why, _ = choosing.decided(
        Auto(), {"a": (3000, 4000)}, network, backward=0.01, like=x, fits=False, half=False
    )
    assert best == "none"
    assert "too small or too large for fp16" in why


@pytest.mark.parametrize("scale", [1e-9, 1e6])
def test_gradients_that_do_not_fit_are_not_sent_in_16_bits(chosen, scale):
    ranks = Ranks(Auto(**QUICK), clocks=[Ticking(1.0) for _ in range(3)])
    assert ranks.until("using", scale=scale).phase == ("using", "none")


def test_gradients_that_shrink_are_sent_whole_again(chosen):
    chosen("fp16")
    ranks = Ranks(Auto(**QUICK), clocks=[Ticking(0.0) for _ in range(3)]).until("using")
    ranks.run(LOOK + 2)
    assert ranks.phase == ("using", "fp16")
    ranks.run(25, scale=1e-8)
    assert ranks.phase == ("using", "none")
    assert "too small" in ranks.pilots[0].why


def test_steps_that_are_not_finite_are_not_measured(chosen):
    chosen("topk:density=0.01")
    ranks = Ranks(Auto(methods=("topk:density=0.01",), **QUICK)).run(10, spoil=(1,))
    assert ranks.phase == ("measuring", "none")
    ranks.until("using").nothing_is_lost()
    ranks.run(3)
    # Nor does what waits get lost, while it cannot be sent.
    for reducer in ranks.reducers:
        reducer.pilot._leave(reducer, "none")
    ranks.run(4, spoil=(2,)).nothing_is_lost()
    assert ranks.phase == ("flushing", "none")
    assert ranks.run(1).phase == ("using", "none")
    ranks.nothing_is_lost()


def test_a_tensor_without_a_gradient_keeps_what_waits(chosen):
    chosen("topk:density=0.01")
    ranks = Ranks(Auto(methods=("topk:density=0.01",), **QUICK)).until("using").run(3)
    for reducer in ranks.reducers:
        reducer.pilot._leave(reducer, "fp16")
    ranks.run(2, only="ab")
    assert ranks.phase == ("using", "fp16")
    assert ranks.the(lambda p: p.left) == ("c",)
    assert np.any(ranks.waits()["c"])
    assert not np.any(ranks.waits()["a"])
    ranks.run(1)
    assert not np.any(ranks.waits()["c"])


def test_one_rank_has_nothing_to_choose():
    reducer = Reducer("auto", LocalEngine())
    for _ in range(20):
        assert reducer.reduce({"a": np.ones(3, np.float32)})["a"].tolist() == [1, 1, 1]
    assert reducer.pilot.phase == "measuring"
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
    assert "no more" in ranks.pilots[2].why


def test_ranks_that_go_and_come_measure_again(chosen):
    """As in an elastic run, whose new worker gets the state of another one."""
    text = "linear"
    chosen(text)
    ranks = Ranks(Auto(methods=(text,), **QUICK), 3, [Ticking(0.0)] * 3).until("using").run(3)
    ranks.meet(2)
    sums = {n: x.reshape(SHAPES[n]) for n, x in ranks.waits().items()}
    ranks.given = {n: ranks.came[n] + x / 2 for n, x in sums.items()}  # that of the third is gone
    ranks.run(1)
    assert ranks.phase == ("measuring", "none")
    ranks.until("using").run(3).nothing_is_lost()
    state = ranks.meeting.run(lambda r: ranks.reducers[r].state_dict(consolidate=False))[0]
    ranks.meet(3, state)
    ranks.run(1)
    assert ranks.phase == ("measuring", "none")
    assert ranks.until("using").phase == ("using", text)
    assert ranks.the(lambda p: p.figures.ranks) == 3


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
        monkeypatch.setattr(pilot, "measured_network", None)
        assert other.phase == ("using", "linear")
        assert other.pilots[0].facts() == trained.pilots[0].facts()
        trained.run(5)
        other.run(5)
        for own, there in zip(trained.reducers, other.reducers, strict=True):
            for name, state in own.store.states.items():
                for key, x in state.items():
                    assert x.tobytes() == there.store.states[name][key].tobytes()

    def test_another_number_of_ranks_measures_again(self, trained):
        (saved, *_) = trained.meeting.run(lambda r: trained.reducers[r].state_dict())
        waits = trained.waits()
        other = self.again(trained, size=2)
        for reducer in other.reducers:
            reducer.load_state_dict(saved)
        sums = {n: x.copy() for n, x in other.waits().items()}
        for name, x in waits.items():  # the mean over the ranks is kept
            np.testing.assert_allclose(sums[name] / 2, x / 3, atol=1e-4)
        for name, x in sums.items():
            other.given[name] += x.reshape(SHAPES[name]) / 2
        other.run(1)
        assert other.phase == ("measuring", "none")
        assert other.until("using").phase == ("using", "linear")
        other.nothing_is_lost()

    def test_another_model_measures_again(self, trained):
        (saved, *_) = trained.meeting.run(lambda r: trained.reducers[r].state_dict())
        other = self.again(trained, shapes={**SHAPES, "d": (500,)})
        for reducer in other.reducers:
            reducer.load_state_dict(saved)
        other.run(1)
        assert other.phase == ("using", "linear")
        other.run(1)
        assert other.phase[0] in ("flushing", "measuring")
        assert other.until("using").phase == ("using", "linear")

    def test_other_options_measure_again(self, trained):
        (saved, *_) = trained.meeting.run(lambda r: trained.reducers[r].state_dict())
        other = Ranks(Auto(**QUICK))
        for reducer in other.reducers:
            reducer.load_state_dict(saved)
        other.run(1)
        assert other.phase == ("measuring", "none")
        assert not any(np.any(x) for x in other.waits().values())

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
            ("left", [1]),
            ("struck", {"fp16": 1}),
            ("ranks", -1),
            ("figures", None),
            ("figures", {}),
        ],
    )
    def test_a_damaged_choice_is_refused(self, trained, key, value):
        (saved, *_) = trained.meeting.run(lambda r: trained.reducers[r].state_dict())
        other = self.again(trained)
        before = other.pilots[0].state()
        saved["choice"] = {**saved["choice"], key: value}
        with pytest.raises(ConfigError, match="nothing was changed"):
            other.reducers[0].load_state_dict(saved)
        assert other.pilots[0].state() == before

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


def test_a_warm_up_is_not_disturbed(chosen):
    text = "powersgd:rank=2,start=40"
    chosen(text)
    ranks = Ranks(Auto(methods=(text,), **QUICK), clocks=[Ticking(0.0) for _ in range(3)])
    ranks.until("using").slow()
    while ranks.reducers[0].step < 39:
        assert ranks.run(1).phase == ("using", text)
    ranks.run(40)
    assert ranks.phase == ("using", "none")


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
        ({"methods": ("ef21",)}, "keeps"),
        ({"methods": ("auto",)}, "none of the methods"),
        ({"methods": ("topk:rows=int8",)}, "without these options"),
        ({"methods": (TopK(),)}, "texts"),
        ({"methods": "topk"}, "a list"),
        ({"steps": 0}, "steps"),
        ({"check": 0}, "check"),
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
