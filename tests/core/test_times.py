"""The phases of time that never count a moment twice."""

import time

import numpy as np
import pytest

from hvd_compress import DGC, OkTopk, SignSGD
from hvd_compress.engines.local import LocalEngine
from hvd_compress.errors import ConfigError
from hvd_compress.reduce import Reducer
from hvd_compress.stats import Stats
from hvd_compress.times import PHASES, BucketTimes, Clock, Times, begin_phase

GRADIENTS = {"a": np.ones((60, 50), np.float32), "b": np.ones(7, np.float32)}


def test_a_moment_belongs_to_one_phase():
    clock = Clock(iter([0, 1, 3, 7, 15, 31]).__next__)
    begin_phase("wait")  # no clock runs
    with clock:
        begin_phase("wait")
        with clock:
            begin_phase("search")
    assert clock.times == Times(other=1 + 4, wait=2 + 16, search=8)
    assert clock.times.total == 31


def test_a_pause_counts_nothing_whatever_phases_begin():
    clock = Clock(iter([0, 1, 3, 7, 15]).__next__)
    with clock:
        with clock.paused():
            begin_phase("wait")  # of another reducer's exchange, for instance
        begin_phase("search")
    assert clock.times == Times(other=1 + 4, search=8)


def test_an_error_ends_its_phase():
    def fail():
        begin_phase("wait")
        raise KeyError

    clock = Clock()
    with pytest.raises(KeyError), clock:
        fail()
    assert clock.switch(None) is None


@pytest.mark.parametrize(
    ("method", "has_loops", "searches"),
    [
        (DGC(density=0.01), True, True),
        (SignSGD(), True, False),
        (OkTopk(density=0.01), False, False),
    ],
)
def test_a_reducer_counts_the_time_of_its_calls(method, has_loops, searches):
    reducer = Reducer(method, LocalEngine())
    started = time.perf_counter()
    for _ in range(3):
        reducer.reduce(GRADIENTS)
    times = reducer.stats().times
    assert times.steps == 3
    assert 0 < times.other < times.total <= time.perf_counter() - started
    assert times.wait > 0
    assert (times.add_up > 0) == (times.encode > 0) == has_loops
    assert (times.search > 0) == searches
    assert "ms a step: search" in reducer.stats().line()


def test_a_reset_begins_again_with_bytes_and_times():
    reducer = Reducer(DGC(density=0.01, indices="int32"), LocalEngine())
    reducer.reduce(GRADIENTS)
    once = reducer.stats().total
    reducer.reset_stats()
    assert reducer.stats().total.bytes_sent == 0
    assert reducer.stats().times == Times()
    reducer.reduce(GRADIENTS)
    assert reducer.stats().total.bytes_sent == once.bytes_sent
    assert reducer.stats().total.steps == reducer.stats().times.steps == 1
    reducer.start("a", GRADIENTS["a"])
    with pytest.raises(ConfigError, match="finish"):
        reducer.reset_stats()


def test_what_goes_on_while_buckets_are_under_way_is_hidden():
    moment = 0.0
    reducer = Reducer(DGC(density=0.01), LocalEngine(), same_order=True)
    reducer.clock.now = lambda: moment
    for _ in range(2):  # the first step sends its buckets at its end
        reducer.start_together(GRADIENTS)
        moment += 1.0
        reducer.finish()
    assert reducer.stats().times.hidden == 1.0
    reducer.start_together(GRADIENTS)
    moment += 2.0
    reducer.abandon()
    moment += 4.0
    reducer.reduce(GRADIENTS)
    assert reducer.stats().times.hidden == 3.0
    assert reducer.stats().times.total == 0.0


def test_every_bucket_has_its_times_and_bytes():
    wide = {**GRADIENTS, "c": np.ones((300, 10), np.float32)}
    reducer = Reducer(DGC(density=0.01), LocalEngine(), bucket_bytes=4 * 3000, same_order=True)
    for _ in range(3):
        reducer.reduce(wide)
    stats = reducer.stats()
    assert {tuple(each.names) for each in stats.buckets.values()} == set(reducer.buckets.plan)
    assert len(stats.buckets) > 1
    for label, each in stats.buckets.items():
        assert label.startswith(each.names[0])
        assert each.record.bytes_sent == sum(stats.layers[n].bytes_sent for n in each.names)
        assert each.times.steps > 0
    for key in ("search", "encode", "add_up"):
        seconds = sum(getattr(each.times, key) for each in stats.buckets.values())
        assert 0 < seconds <= getattr(stats.times, key) * (1 + 1e-9)


def test_the_wait_of_a_bucket_is_the_wait_while_it_is_under_way():
    now = map(float, range(100))

    def exchange():
        begin_phase("search")
        reply = yield "request"
        begin_phase("add_up")
        return reply

    clock = Clock(now.__next__)
    with clock:
        watched = clock.watch(["a", "b"], exchange())
        assert next(watched) == "request"
        begin_phase("wait")
        with pytest.raises(StopIteration) as stop:
            watched.send("reply")
    assert stop.value.value == "reply"
    [(names, own)] = clock.buckets.items()
    assert names == ("a", "b")
    # Each look at the clock takes a second.
    assert own == BucketTimes(search=1, add_up=1, other=2, wait=1, under_way=2, steps=1)


def test_times_are_shown_a_step():
    times = Times(search=0.002, wait=0.008, steps=2)
    assert times.line() == (
        "5.0 ms a step: search 1.0, encode 0.0, wait 4.0, add up 0.0, other 0.0; hidden 0.0"
    )
    seen = Stats({}, times).scalars()
    assert seen["seconds a step/wait"] == 0.004
    assert {name.rpartition("/")[2] for name in seen if "seconds" in name} == set(PHASES)
