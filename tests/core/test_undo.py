"""Steps whose averages are not used: what waits stays as it was."""

import numpy as np
import pytest

from hvd_compress.engines.local import LocalEngine
from hvd_compress.errors import ConfigError, MismatchError, UnsupportedError
from hvd_compress.reduce import Reducer
from tests.method_table import ROWS
from tests.systems.ranks import Meeting, ThreadEngine

SHAPES = {"a": (12, 10), "b": (30,), "c": (8, 16)}
SIZE = 2


def gradients(rank, step):
    random = np.random.default_rng([rank, step])
    return {n: random.normal(size=shape).astype(np.float32) for n, shape in SHAPES.items()}


def on_ranks(function, size=SIZE):
    """Return what a function of an engine and its rank returns, on each rank."""
    meeting = Meeting(size)
    return meeting.run(lambda rank: function(ThreadEngine(meeting, rank), rank))


def reducer_of(method, engine, **options):
    momentum = 0.9 if method.takes_momentum and method.momentum is None else 0.0
    reducer = Reducer(method, engine, momentum=momentum, in_place=True, **options)
    reducer.set_epoch(1)
    return reducer


def states_of(reducer):
    names = sorted(reducer.store.names())
    return {n: {k: x.copy() for k, x in sorted(reducer.store.get(n).items())} for n in names}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_discarded_step_leaves_no_trace(row):
    def run(engine, rank, discarded):
        reducer, found = reducer_of(row.method, engine), []
        reducer.keep_undo()
        for step in range(4):
            if step in discarded:
                reducer.reduce({n: 3 * g for n, g in gradients(rank, 100).items()})
                reducer.discard()
            averages = reducer.reduce(gradients(rank, step))
            found.append(({n: x.copy() for n, x in averages.items()}, states_of(reducer)))
            reducer.forget_undo()
        return reducer.step, found

    discarding = on_ranks(lambda engine, rank: run(engine, rank, (0, 2)))
    plain = on_ranks(lambda engine, rank: run(engine, rank, ()))
    np.testing.assert_equal(discarding, plain)


def test_gradients_under_way_are_finished_and_dropped():
    def run(engine, rank):
        reducer = reducer_of(ROWS["dgc"].method, engine)
        reducer.keep_undo()
        reducer.reduce(gradients(rank, 0))
        before = states_of(reducer)
        reducer.start("a", gradients(rank, 1)["a"])
        reducer.start_together({n: gradients(rank, 1)[n] for n in "bc"})
        reducer.discard()
        return before, states_of(reducer), reducer.step

    for before, after, step in on_ranks(run):
        np.testing.assert_equal(after, before)
        assert step == 1


def test_what_no_rank_used_keeps_its_state_and_has_no_average():
    def run(engine, rank):
        reducer = reducer_of(ROWS["dgc"].method, engine, finds_unused=True)
        reducer.reduce(gradients(rank, 0))
        before = states_of(reducer)
        zeros = {n: 0 * g for n, g in gradients(rank, 1).items()}
        # No rank uses a, rank 0 alone uses b, and all use c.
        given = {**zeros, **{n: gradients(rank, 1)[n] for n in ("bc" if rank == 0 else "c")}}
        averages = reducer.start_together(given, "a" if rank == 0 else "ab") or reducer.finish()
        return before, states_of(reducer), averages

    for before, after, averages in on_ranks(run):
        np.testing.assert_equal(after["a"], before["a"])
        assert not averages["a"].any()
        assert averages["b"].any()
        assert averages["c"].any()
        assert all((after[n]["velocity"] != before[n]["velocity"]).any() for n in "bc")


def test_a_step_of_unused_tensors_can_be_discarded_as_a_whole():
    def run(engine, rank):
        reducer = reducer_of(ROWS["topk"].method, engine, finds_unused=True)
        reducer.keep_undo()
        reducer.reduce(gradients(rank, 0))
        before = states_of(reducer)
        reducer.start_together({**gradients(rank, 1), "a": np.zeros((12, 10), "f4")}, "a")
        reducer.finish()
        reducer.discard()
        return before, states_of(reducer)

    for before, after in on_ranks(run):
        np.testing.assert_equal(after, before)


def test_nothing_to_discard_is_an_error_that_says_what_to_call():
    reducer = Reducer("topk", LocalEngine())
    with pytest.raises(ConfigError, match=r"keep_undo\(\) once, before training"):
        reducer.discard()
    reducer.keep_undo()
    with pytest.raises(ConfigError, match="no step to discard"):
        reducer.discard()
    reducer.reduce({"a": np.ones(4, "f4")})
    reducer.discard()
    with pytest.raises(ConfigError, match="no step to discard"):
        reducer.discard()


def test_auto_cannot_discard():
    with pytest.raises(UnsupportedError, match="name the method"):
        Reducer("auto", LocalEngine()).keep_undo()


def test_ranks_that_differ_in_it_say_so():
    def run(engine, rank):
        reducer = Reducer("topk", engine)
        if rank == 0:
            reducer.keep_undo()
        with pytest.raises(MismatchError, match="keeps undo"):
            reducer.reduce(gradients(rank, 0))

    on_ranks(run)
