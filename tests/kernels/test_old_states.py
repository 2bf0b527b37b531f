"""Old states, kept while it is not known whether the new ones hold (``fused/in_place.py``)."""

from __future__ import annotations

import copy
import gc
import weakref

import numpy as np
import pytest
import torch

from hvd_compress import (
    DGC,
    Context,
    EFSignSGD,
    LinearQuantization,
    OneBit,
    TopK,
    kernels,
)
from hvd_compress.engines.joining import PlacedTensor, exchanged, plan_for, tensors_of
from hvd_compress.engines.local import LocalEngine
from hvd_compress.engines.lockstep import World
from hvd_compress.engines.named import NamedEngine
from hvd_compress.errors import CompressionError, PayloadError
from hvd_compress.fused import in_place
from hvd_compress.fused.in_place import SpareMemory, spare_memory
from hvd_compress.reduce import Reducer
from hvd_compress.stats import Record

SHAPES = {"a": (50, 40), "b": (300, 7)}
METHODS = [
    TopK(density=0.02),
    DGC(density=0.05, min_size=0),
    DGC(density=0.05, min_size=0, nesterov=True),
    OneBit(),
    OneBit(via="allgather"),
    EFSignSGD(),
    LinearQuantization(bits=6),
]
NAMES = ["topk", "dgc", "nesterov", "onebit", "onebit-allgather", "efsignsgd", "linear"]
each = pytest.mark.parametrize("method", METHODS, ids=NAMES)


class Rank:
    """One rank alone, with tensors of PyTorch, whose buckets may be under way."""

    def __init__(self, method):
        self.method, self.plan = method, None
        self.random = np.random.default_rng(0)
        self.states = {n: method.init(torch.zeros(s)) for n, s in SHAPES.items()}

    def gradients(self):
        return {
            n: torch.tensor(self.random.standard_normal(s, np.float32)) for n, s in SHAPES.items()
        }

    def begun(self, gradients):
        step, group = Context(momentum=0.9, in_place=True), []
        for name, gradient in gradients.items():
            place = self.method.place(gradient, step._replace(name=name))
            group.append(PlacedTensor(name, gradient, self.states[name], place, 0.9))
        self.plan = plan_for(group, step, self.plan)
        return exchanged(self.plan, tensors_of(group), step, Record())

    def bind(self, **functions):
        """Let the plan call other functions of codecs, where it calls any."""
        if hasattr(self.plan, "bound"):
            self.plan.bound = [bound._replace(**functions) for bound in self.plan.bound]

    def step(self):
        exchange = self.begun(self.gradients())
        return self.ended(exchange, next(exchange).arrays[0])

    def ended(self, exchange, frame):
        while True:
            try:
                (frame,) = exchange.send([frame]).arrays
            except StopIteration as stop:
                return stop.value

    def copies(self):
        return [x.clone() for own in self.states.values() for x in own.values()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def damage(exchange, frame):
    frame = frame.copy()
    frame[20] ^= 1
    with pytest.raises(PayloadError):
        exchange.send([frame])


def close(exchange, frame):
    exchange.close()


def forget(exchange, frame):
    del exchange


@each
@pytest.mark.parametrize("end", [damage, close, forget])
def test_states_are_put_back_where_a_step_ends_early(method, end):
    rank = Rank(method)
    for _ in range(2):
        rank.step()
    before, exchange = rank.copies(), rank.begun(rank.gradients())
    frame = next(exchange).arrays[0]
    assert not same(rank.copies(), before)  # the new ones are there, or nothing is tested
    holder = [exchange]
    del exchange
    end(holder.pop(), frame)
    assert same(rank.copies(), before)


@each
def test_memory_that_is_changed_on_the_way_is_not_written_to(method):
    """A state that was given instead stays as it is, and other states are put back."""
    rank = Rank(method)
    rank.step()
    before = {n: {k: x.clone() for k, x in own.items()} for n, own in rank.states.items()}
    exchange = rank.begun(rank.gradients())
    frame = next(exchange).arrays[0]
    rank.states["a"]["residual"].data = torch.ones(2000)
    with pytest.raises(CompressionError, match="memory of a tensor was changed"):
        exchange.send([frame])
    before["a"]["residual"] = torch.ones(2000)
    torch.testing.assert_close(rank.states, before, rtol=0, atol=0)


@each
def test_a_bucket_that_finds_no_memory_has_the_same_bits(method):
    """More buckets under way than there is memory for."""
    ranks, world = [Rank(method) for _ in range(4)], World(method, 1)
    for _ in range(3):
        gradients = ranks[0].gradients()
        expected = {
            n: world.exchange([g.clone()], n, momentum=0.9)[0] for n, g in gradients.items()
        }
        begun, was = [], [rank.copies() for rank in ranks]
        for rank in ranks:
            exchange = rank.begun(copy.deepcopy(gradients))
            begun.append((rank, exchange, next(exchange).arrays[0]))
        moved = [not same(rank.copies(), old) for rank, old in zip(ranks, was, strict=True)]
        assert moved == [True, *[not isinstance(method, DGC)] * 3]  # which alone needs some
        for rank, exchange, frame in begun:
            found = rank.ended(exchange, frame)
            for i, name in enumerate(SHAPES):
                assert torch.equal(found.directions[i], expected[name].direction)
                for key, x in expected[name].state.items():
                    assert torch.equal(found.states[i][key].view(-1), x.view(-1))


@pytest.mark.parametrize(
    ("method", "passes"),
    [*((method, 0) for method in METHODS), *((method, 1) for method in METHODS[3:])],
    ids=[*NAMES, *(f"{name}, the second" for name in NAMES[3:])],
)
def test_a_pass_that_fails_puts_back_what_was_done(method, passes, monkeypatch):
    """Before it begins, where the gradient is still in the memory where old states would be kept;
    or between two tensors."""
    rank, done = Rank(method), []
    rank.step()
    before = rank.copies()
    feed = rank.plan.bound[0].feed if passes else None

    def fails(*arguments):
        if len(done) == passes:
            raise MemoryError
        done.append(feed(*arguments))
        return done[0]

    monkeypatch.setattr(kernels.TopKSelection, "select", fails)
    rank.bind(feed=fails)
    with pytest.raises(MemoryError):
        next(rank.begun(rank.gradients()))
    assert [bool(found[0]) for found in done] == [True] * passes
    assert same(rank.copies(), before)


@pytest.mark.parametrize("method", METHODS[3:], ids=NAMES[3:])
def test_a_code_that_means_nothing_leaves_each_tensor_a_state_of_its_own(method, monkeypatch):
    """The first has its new residual then, and the second this or the old one; none has a mean."""
    rank, done = Rank(method), []
    rank.step()
    before = rank.copies()
    exchange = rank.begun(rank.gradients())
    frame, new = next(exchange).arrays[0], rank.copies()

    mean = rank.plan.bound[0].mean

    def fails(*arguments):
        if done:
            raise ValueError("no such digit")
        done.append(mean(*arguments))
        return done[0]

    rank.bind(mean=fails)
    with pytest.raises(PayloadError, match="no such digit"):
        rank.ended(exchange, frame)
    keys = [(name, key) for name, own in rank.states.items() for key in own]
    for (name, key), x, old, its_new in zip(keys, rank.copies(), before, new, strict=True):
        if key == "residual":
            assert torch.equal(x, its_new) or (name == "b" and torch.equal(x, old))
            assert not torch.equal(old, its_new)


@each
def test_gradients_that_share_memory_are_all_read(method):
    """The last one to write a result wins, and states are those of each gradient."""
    both = Reducer(method, LocalEngine(), momentum=0.9 * method.takes_momentum, in_place=True)
    apart = Reducer(method, LocalEngine(), momentum=0.9 * method.takes_momentum)
    random = np.random.default_rng(0)
    for _ in range(3):
        x = random.standard_normal((50, 40), np.float32)
        apart.reduce({"a": x, "b": x})
        both.reduce({"a": x, "b": x})
    np.testing.assert_equal(both.state_dict()["states"], apart.state_dict()["states"])


def test_memory_is_handed_on_and_goes_with_the_last_bucket(monkeypatch):
    monkeypatch.setattr(in_place, "_shared", None)  # without what other tests hold
    rank, pool = Rank(METHODS[1]), None
    for _ in range(3):
        rank.step()
        pool = pool or weakref.ref(spare_memory())
    assert len(pool()._free) == 1
    del rank
    gc.collect()
    assert pool() is None


def test_larger_memory_takes_the_place_of_smaller():
    pool = SpareMemory()
    small = pool.take(10)
    assert pool.take(1) is None
    pool.give(small)
    assert pool.take(3) is small
    pool.give(small)
    large = pool.take(1000)
    assert large.size == 1000
    assert pool.take(1) is None
    pool.give(large)
    assert pool.take(10) is large


class Failing(NamedEngine):
    """One of two ranks that do the same, until collectives fail after they have begun."""

    rank, size = 0, 2
    fails = False

    def _launch(self, op):
        return op

    def _wait(self, op):
        if self.fails and "gather" in op.kind:
            raise ConnectionError("no route to a rank")
        if op.kind == "alltoall":
            mine = op.tensor[: op.splits[0]]
            return np.concatenate([mine, mine]), np.array([mine.size] * 2)
        if op.kind == "sum":
            return 2 * op.tensor
        return np.concatenate([op.tensor] * 2) if "gather" in op.kind else op.tensor

    def _split(self, own, everything):
        return np.split(everything, 2)

    def _splits(self, sizes):
        return np.array(sizes)


@each
def test_after_a_failed_collective_states_are_those_of_before(method):
    engine, random = Failing(), np.random.default_rng(0)
    reducer = Reducer(method, engine, momentum=0.9 * method.takes_momentum, in_place=True)

    def gradients():
        shapes = {"a": (64, 64), "b": (256, 8)}  # of which both ranks have shards of one size
        return {n: random.standard_normal(s, np.float32) for n, s in shapes.items()}

    for _ in range(3):
        reducer.reduce(gradients())
    before = copy.deepcopy(reducer.state_dict()["states"])
    engine.fails = True
    with pytest.raises(ConnectionError) as failure:
        reducer.reduce(gradients())
    np.testing.assert_equal(reducer.state_dict()["states"], before)
    assert failure.traceback  # which holds what was under way
