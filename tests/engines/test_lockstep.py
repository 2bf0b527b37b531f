"""The world inside one process: replies, several rounds, and ranks that do not fit together."""

import dataclasses
import re

import numpy as np
import pytest
import torch

from hvd_compress import (
    DGC,
    Broadcast,
    CompressionError,
    Context,
    Gather,
    Max,
    Neighbors,
    NoCompression,
    Outcome,
    Sum,
    TopK,
    UnsupportedError,
)
from hvd_compress.backends import backend_of
from hvd_compress.engines.lockstep import World, reply_to, run
from tests.stateless import Stateless

MAKES = [np.asarray, torch.from_numpy]


def arrays(make, *rows, dtype=np.float32):
    return [make(np.array(row, dtype)) for row in rows]


@pytest.mark.parametrize("make", MAKES)
def test_sum_and_max(make):
    rows = arrays(make, [1, -2, 3], [0, 5, -6], [2, 2, 2])
    assert reply_to([Sum(x) for x in rows]).tolist() == [3, 5, -1]
    assert reply_to([Max(x) for x in rows]).tolist() == [2, 5, 3]
    assert [x.tolist() for x in rows] == [[1, -2, 3], [0, 5, -6], [2, 2, 2]]  # untouched


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("request_type", [Sum, Max])
def test_nan_reaches_all(make, request_type):
    rows = arrays(make, [1, np.nan], [2, 3])
    assert np.isnan(np.asarray(reply_to([request_type(x) for x in rows]))[1])


@pytest.mark.parametrize("make", MAKES)
def test_what_travels_in_half_precision_is_rounded_before_and_after_adding(make):
    rows = arrays(make, [1 + 2**-11, 2048, 40000], [0, 1, 40000])
    with np.errstate(over="ignore"):
        total = reply_to([Sum(x, "float16") for x in rows])
    # a tie to even before; 2049 does not fit and is rounded after; an overflow is Inf
    assert total.tolist() == [1.0, 2048.0, np.inf]
    assert backend_of(total).dtype(total) == "float32"
    assert reply_to([Sum(x, "bfloat16") for x in arrays(make, [257], [1])]).tolist() == [256.0]


def test_neighbours_in_a_directed_graph():
    """0 and 1 send to 2, which sends to 1; nothing comes to 0."""
    a, b, c = (np.full(2, n, np.uint8) for n in (10, 11, 12))
    requests = [Neighbors(a, (2,), ()), Neighbors(b, (2,), (2,)), Neighbors(c, (1,), (1, 0))]
    replies = [[x.tolist() for x in reply_to(requests, rank)] for rank in range(3)]
    assert replies == [[], [[12, 12]], [[11, 11], [10, 10]]]


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([((1,), (1,)), ((), ())], "rank 0 sends to rank 1, which does not receive it"),
        ([((), (1,)), ((), ())], "rank 0 waits for rank 1, which sends to ()"),
        ([((0,), (0,)), ((), ())], "rank 0 sends to rank 0"),
    ],
)
def test_neighbours_that_do_not_fit(requests, words):
    byte = np.zeros(1, np.uint8)
    with pytest.raises(CompressionError, match=re.escape(words)):
        reply_to([Neighbors(byte, *ranks) for ranks in requests])


def test_neighbours_of_other_sizes():
    byte, two = np.zeros(1, np.uint8), np.zeros(2, np.uint8)
    with pytest.raises(CompressionError, match=r"rank 0 has 1 bytes .* rank 1 2"):
        reply_to([Neighbors(byte, (1,), (1,)), Neighbors(two, (0,), (0,))])
    longer = [Neighbors(byte, (1,), (1,), False), Neighbors(two, (0,), (0,), False)]
    assert reply_to(longer)[0].size == 2


@pytest.mark.parametrize("make", MAKES)
def test_broadcast(make):
    rows = arrays(make, [1, np.nan], [2, -0.0], [3, 4])
    assert reply_to([Broadcast(x, 1) for x in rows], 2).tolist() == [2, 0]
    with pytest.raises(CompressionError, match=r"roots of 3 ranks are \[0, 1\]"):
        reply_to([Broadcast(x, root) for x, root in zip(rows, (0, 1, 1), strict=True)])
    with pytest.raises(CompressionError, match=r"\[3\]"):
        reply_to([Broadcast(x, 3) for x in rows])
    with pytest.raises(CompressionError, match="differ"):
        reply_to([Broadcast(x, 0) for x in arrays(make, [1], [2, 3])])


def test_gather_keeps_rank_order_and_sizes():
    payloads = [np.full(size, size, np.uint8) for size in (3, 0, 5)]
    reply = reply_to([Gather(payload) for payload in payloads])
    assert [x.tolist() for x in reply] == [[3, 3, 3], [], [5, 5, 5, 5, 5]]


@dataclasses.dataclass(frozen=True)
class ThreeRounds(Stateless, name="test-three-rounds"):
    """The average in units of the largest magnitude: Max, Gather and Sum, one after the other."""

    def exchange(self, gradient, state, context):
        xp = backend_of(gradient)
        x = xp.widen(gradient)
        scale = yield Max(xp.abs(x))
        ranks = yield Gather(xp.from_numpy(np.array([context.rank], np.uint8), x))
        assert [int(r[0]) for r in ranks] == list(range(context.size))
        total = yield Sum(x / scale)
        mean = total * scale / context.size
        return Outcome(xp.restore(mean, gradient), x, {})


@pytest.mark.parametrize("make", MAKES)
def test_several_rounds(make):
    world = World(ThreeRounds(), 3)
    outcomes = world.exchange(arrays(make, [1, -8], [2, 4], [3, 1]))
    for outcome in outcomes:
        np.testing.assert_allclose(np.asarray(outcome.mean), [2, -1], rtol=1e-6)


def test_hundreds_of_ranks():
    gradients = list(np.random.default_rng(0).normal(size=(300, 4, 8)))
    mean = World(NoCompression(), 300).exchange(gradients)[299].mean
    np.testing.assert_allclose(mean, np.mean(gradients, axis=0), atol=1e-12)


def test_the_world_counts_steps_and_keeps_states_by_name():
    seen = []

    @dataclasses.dataclass(frozen=True)
    class Spy(ThreeRounds, name="test-spy"):
        def init(self, gradient):
            return {"count": np.zeros(1)}

        def exchange(self, gradient, state, context):
            seen.append((context.name, context.rank, context.step, context.epoch, context.seed))
            outcome = yield from super().exchange(gradient, state, context)
            return outcome._replace(state={"count": state["count"] + 1})

    world = World(Spy(), 2, seed=5)
    gradients = arrays(np.asarray, [1], [2])
    world.exchange(gradients, "a")
    world.epoch = 4
    world.exchange(gradients, "b")
    world.exchange(gradients, "a")
    assert seen == [
        ("a", 0, 0, None, 5),
        ("a", 1, 0, None, 5),
        ("b", 0, 0, 4, 5),
        ("b", 1, 0, 4, 5),
        ("a", 0, 1, 4, 5),
        ("a", 1, 1, 4, 5),
    ]
    assert world.steps == {"a": 2, "b": 1}
    assert [state["count"][0] for state in world.states["a"]] == [2, 2]
    assert [state["count"][0] for state in world.states["b"]] == [1, 1]
    world.exchange(gradients, "a", epoch=9, step=70)
    assert seen[-1] == ("a", 1, 70, 9, 5)


def test_direction_is_the_update_where_there_is_one():
    assert Outcome(mean=1, sent=1, state={}).direction == 1
    assert Outcome(mean=1, sent=1, state={}, update=2).direction == 2


# Ranks that do not fit together: on a real network they would hang or add nonsense.


@pytest.mark.parametrize(
    "requests",
    [
        [Sum(np.zeros(2)), Sum(np.zeros(3))],
        [Max(np.zeros(2)), Max(np.zeros((2, 1)))],
        [Sum(np.zeros(2)), Sum(np.zeros(2, np.float32))],
        [Sum(np.zeros(2)), Sum(np.zeros(2), "float16")],
    ],
    ids=["size", "shape", "dtype", "wire"],
)
def test_arrays_that_differ(requests):
    with pytest.raises(CompressionError, match="arrays differ"):
        reply_to(requests)


@pytest.mark.parametrize("other", [Max(np.zeros(2)), Gather(np.zeros(2, np.uint8))])
def test_different_requests(other):
    with pytest.raises(CompressionError, match="different things at once"):
        reply_to([Sum(np.zeros(2)), other])


def rounds(count):
    for _ in range(count):
        yield Sum(np.zeros(1))
    return Outcome(np.zeros(1), np.zeros(1), {})


@pytest.mark.parametrize("counts", [(1, 2), (2, 1), (3, 3, 1)])
def test_ranks_that_finish_at_different_times(counts):
    with pytest.raises(CompressionError, match="some ranks are done"):
        run([rounds(count) for count in counts])


def test_the_number_of_gradients():
    with pytest.raises(CompressionError, match="1 gradients for 2 ranks"):
        World(TopK(), 2).exchange([np.zeros(1)])


def test_a_failed_exchange_counts_as_none():
    world = World(TopK(density=0.5), 2)
    world.exchange([np.ones(4), np.ones(4)])
    before = [state["residual"].copy() for state in world.states["tensor"]]
    with pytest.raises(UnsupportedError, match="int64"):
        world.exchange([np.ones(4), np.ones(4, np.int64)])
    assert world.steps == {"tensor": 1}
    for state, residual in zip(world.states["tensor"], before, strict=True):
        np.testing.assert_array_equal(state["residual"], residual)


def test_arrays_of_nobody():
    with pytest.raises(UnsupportedError, match=r"no array backend for builtins\.list"):
        backend_of([1.0])


@pytest.mark.parametrize("subclass", [torch.nn.Parameter, lambda x: x.as_subclass(Special)])
def test_subclasses_of_arrays_find_their_backend(subclass):
    tensor = subclass(torch.zeros(2))
    assert backend_of(tensor) is backend_of(torch.zeros(1))
    assert backend_of(np.zeros(1).view(np.recarray)) is backend_of(np.zeros(1))


class Special(torch.Tensor):
    pass


def test_context_defaults_are_those_of_a_lone_rank():
    assert Context() == Context("tensor", 0, 1, 0, None, 0, 0.0, False, None)


def test_infinities_of_both_signs_add_up_to_nan():
    """Without a warning: nobody who trains wants one in each step that a loss scale spoils."""
    requests = [Sum(np.array([x * np.inf, 1.0])) for x in (1, -1)]
    assert np.isnan(reply_to(requests)[0])
    in_half = [Sum(np.array([x * 1e5, 1], np.float32), "float16") for x in (1, -1)]
    total = reply_to(in_half)
    assert np.isnan(total[0])
    assert total[1] == 2


def test_clipping_knows_the_norm_of_all_tensors():
    world = World(DGC(density=1.0, momentum=0.0, clip_norm=1.0, min_size=1), 1)
    outcome = world.exchange_all([{"a": np.full((1, 1), 3.0), "b": np.full((1, 1), 4.0)}])[0]
    assert [outcome[name].mean.item() for name in "ab"] == pytest.approx([0.6, 0.8])


def test_the_record_has_what_rank_0_sent():
    world = World(NoCompression(), 3)
    for _ in range(2):
        world.exchange_all([{"a": np.zeros(5, np.float32), "b": np.zeros(2, np.float32)}] * 3)
    assert world.record.bytes_sent == 2 * 4 * 7
