"""Exchanges of whole buckets in fused loops, against the chains of blocks that define them."""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
import tracemalloc

import numpy as np
import pytest
import tensorflow as tf
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_compress import (
    DGC,
    EF21,
    FP8,
    FP16,
    QSGD,
    EFSignSGD,
    LinearQuantization,
    NaturalCompression,
    NoCompression,
    OneBit,
    OneBitAdamCompression,
    PowerSGD,
    RandomK,
    Signum,
    TernGrad,
    Threshold,
    TopK,
    kernels,
    switch,
)
from hvd_compress.base import Outcome, Tensors
from hvd_compress.chain import Chain
from hvd_compress.codecs import contraction, natural, uniform_dithering
from hvd_compress.engines.joining import PlacedTensor, plan_for
from hvd_compress.engines.local import LocalEngine
from hvd_compress.engines.lockstep import World, replies_to
from hvd_compress.errors import PayloadError
from hvd_compress.meetings import allgather, alltoall
from hvd_compress.reduce import Reducer
from hvd_compress.transforms import (
    clip_by_local_norm,
    ef21,
    error_feedback,
    momentum_after_averaging,
    smoothing,
)
from tests.kernels.buckets import (
    Ranks,
    assert_all_equal,
    assert_equal,
    gradients_of,
    made,
    one_by_one,
    two_of_three,
)

METHODS = [
    DGC(density=0.05, min_size=0),
    DGC(density=0.05, min_size=0, nesterov=True, values="float16"),
    DGC(density=0.1, min_size=0, masking=False, indices="packed"),
    DGC(density=0.05, min_size=0, clip_norm=1.0),
    TopK(density=0.02),
    TopK(density=0.02, values="float16", indices="packed"),
    DGC.compact(density=0.05, nesterov=True),
    TopK(density=0.02, values="4bit"),
    DGC(min_size=10**6),
    DGC(min_size=10**6, nesterov=True, clip_norm=1.0),
    NoCompression(),
    FP16(),
]
CODED = [
    FP8(),
    LinearQuantization(bits=6),
    OneBit(),
    OneBit(via="allgather"),
    EFSignSGD(),
    EFSignSGD(via="allgather"),
    QSGD(),
    TernGrad(),
    NaturalCompression(),
    Chain(
        (clip_by_local_norm(1.0), error_feedback()),
        via=alltoall(contraction(uniform_dithering(7, 64))),
    ),
    Chain((), via=alltoall(natural())),
    PowerSGD(rank=2, min_compression_rate=1),
    PowerSGD(rank=6, min_compression_rate=1, error_feedback=False),
    OneBitAdamCompression(freeze_step=True, min_size=0),
    Signum(nesterov=True),
    RandomK(),
    EF21(density=0.05, average=0.9),
    EF21(density=0.05, values="4bit", indices="int32"),
    RandomK(density=0.7, error_feedback=False, wire="float16"),
    Chain((momentum_after_averaging(), smoothing(0.8), ef21()), via=allgather(natural())),
    Threshold(tau=0.5),
    Threshold(tau=2.5, indices="int32"),
]
MAKERS = {"numpy": np.array, "torch": torch.tensor, "tensorflow": tf.constant}

HALVES = {
    "numpy float16": lambda x: x.astype(np.float16),
    "torch float16": lambda x: torch.tensor(x).half(),
    "torch bfloat16": lambda x: torch.tensor(x).bfloat16(),
}


def wide(outcome):
    mean = outcome.mean
    return outcome._replace(mean=mean.float() if isinstance(mean, torch.Tensor) else mean)


@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("method", METHODS[:8], ids=repr)
def test_a_bucket_of_half_precision_is_what_its_tensors_are(kind, method):
    """Also where the mean of residuals is beyond its range, and where a gradient is NaN."""
    shapes, random = {"a": (40, 30), "b": (64, 8), "c": (300, 7)}, np.random.default_rng(0)
    ranks = Ranks(method, shapes, 2, in_place=kind.startswith("torch"))
    expected, overflowed = one_by_one(method, 2), 0
    for step in range(5):
        gradients = gradients_of(random, shapes, 2)
        if step == 2:
            gradients[1]["b"][3, 3] = np.nan
        if step >= 3:
            for own in gradients:
                own["c"][5, 5] = 6e4 if "float16" in kind.split() else 3e38
        halves = made(gradients, HALVES[kind])
        wanted = expected(copy.deepcopy(halves))
        for own, other in zip(ranks.exchange(halves), wanted, strict=True):
            for name in shapes:
                assert own[name].mean.dtype == other[name].mean.dtype
                assert_equal(wide(own[name]), wide(other[name]))
            overflowed += step >= 3 and not np.isfinite(np.asarray(wide(own["c"]).mean)).all()
    if method == METHODS[2]:  # whose velocity grows, without masking
        assert overflowed


@pytest.mark.parametrize("framework", MAKERS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_bucket_is_what_its_tensors_are(framework, data):
    """Bit for bit, whatever the gradients, also over steps with a NaN or Inf on some rank."""
    method = data.draw(st.sampled_from(METHODS + CODED))
    size = data.draw(st.sampled_from([1, 2, 3, 4]))
    count = data.draw(st.integers(1, 4))
    shapes = {
        f"t{i}": data.draw(st.sampled_from([(40, 30), (64, 8), (300, 7)])) for i in range(count)
    }
    random = np.random.default_rng(data.draw(st.integers(0, 100)))
    ranks, expected = Ranks(method, shapes, size), one_by_one(method, size)
    make = MAKERS[framework]
    for _ in range(4):
        kind = data.draw(st.sampled_from(["normal", "ties", "zeros"]))
        of_kind = {"normal": np.copy, "ties": np.round, "zeros": np.zeros_like}[kind]
        gradients = [
            {n: of_kind(x) for n, x in own.items()} for own in gradients_of(random, shapes, size)
        ]
        if data.draw(st.booleans()):
            bad = gradients[data.draw(st.integers(0, size - 1))]
            name = data.draw(st.sampled_from(sorted(shapes)))
            bad[name][0, 0] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
        gradients = made(gradients, make)
        given_ = copy.deepcopy(gradients)
        assert_all_equal(ranks.exchange(gradients), expected(given_))
        # Nobody wrote into them.
        np.testing.assert_equal(made(gradients, np.asarray), made(given_, np.asarray))


@pytest.mark.parametrize("method", [*METHODS[:8], *CODED], ids=repr)
def test_a_graph_gives_the_same(method):
    """Steps are symbols, and states those of the graph's last run.  Gradients stay as they were."""
    shapes, random = {"a": (40, 30), "b": (64, 8)}, np.random.default_rng(0)
    ranks, expected = Ranks(method, shapes, 2), one_by_one(method, 2)

    @tf.function(autograph=False)
    def exchange(step, gradients, states):
        ranks.step, ranks.states = step, [dict(x) for x in states]
        return [
            {name: (o.direction, o.state) for name, o in own.items()}
            for own in ranks.exchange(gradients)
        ]

    states = None
    for step in range(4):
        gradients = gradients_of(random, shapes, 2)
        if step == 2:
            gradients[1]["b"][3, 3] = np.nan
        tensors = made(gradients, tf.constant)
        if states is None:
            states = [{n: method.init(x) for n, x in own.items()} for own in tensors]
        found = exchange(tf.constant(step, tf.int64), tensors, states)
        tf.nest.map_structure(np.testing.assert_array_equal, tensors, gradients)
        for own, others in zip(found, expected(gradients), strict=True):
            for name, other in others.items():
                direction, state = tf.nest.map_structure(np.asarray, own[name])
                assert_equal(Outcome(direction, None, state), other)
        states = [{n: state for n, (_, state) in own.items()} for own in found]


@pytest.mark.parametrize("method", [METHODS[4], LinearQuantization()], ids=repr)
def test_graphs_share_what_they_keep(method):
    """A function that is traced for each length of a batch needs no memory for each trace: it is
    that of one result and of the states, which are written where they are."""
    ranks, gradient = Ranks(method, {"a": (40, 30)}, 1), {"a": tf.random.normal([40, 30])}
    states, needed = {k: tf.Variable(x) for k, x in method.init(gradient["a"]).items()}, []

    def exchange():
        ranks.states = [{"a": {key: x.value() for key, x in states.items()}}]
        outcome = ranks.exchange([gradient])[0]["a"]
        for key, x in outcome.state.items():
            states[key].assign(x)
        return outcome.mean

    for _ in range(4):
        trace = tf.function(exchange, autograph=False)
        for _ in range(3):
            trace()
        scratch = ranks.scratch[0]
        needed.append((len(scratch), scratch["memory"].nbytes))
    arrays = 1 + len(states)
    assert needed == 4 * [(2, arrays * 4 * (40 * 30 + 16))]


@pytest.mark.parametrize(
    "method", [DGC(density=0.1), LinearQuantization(), PowerSGD(min_compression_rate=1)], ids=repr
)
def test_a_graph_that_fails_leaves_states_as_they_were(method):
    """States are written in place, some of them before the other ranks have answered."""
    shapes, random = {"a": (64, 40), "b": (64, 24)}, np.random.default_rng(0)
    ranks, fails = Ranks(method, shapes, 1), tf.Variable(False)
    gradients = {name: tf.Variable(tf.zeros(shape)) for name, shape in shapes.items()}
    states = {
        name: {key: tf.Variable(x) for key, x in method.init(x.value()).items()}
        for name, x in gradients.items()
    }

    def answered(requests):
        check = tf.debugging.assert_equal(fails, False)
        with tf.control_dependencies([check]):
            return [tf.nest.map_structure(tf.identity, reply) for reply in replies_to(requests)]

    def exchange(*names):
        ranks.states = [{n: {key: x.value() for key, x in states[n].items()} for n in names}]
        found = ranks.exchange([{name: gradients[name].value() for name in names}], answered)[0]
        for name, outcome in found.items():
            for key, x in outcome.state.items():
                states[name][key].assign(x)
        return {name: outcome.mean for name, outcome in found.items()}

    def kept():
        return {name: {key: x.numpy() for key, x in own.items()} for name, own in states.items()}

    def in_memory():
        return [x.value().__array__().ctypes.data for x in tf.nest.flatten(states)]

    def failing(*names):
        fails.assign(True)
        with pytest.raises(tf.errors.InvalidArgumentError):
            step(*names)
        fails.assign(False)

    step, expected = tf.function(exchange, autograph=False), one_by_one(method, 1)
    for number in range(7):
        own = gradients_of(random, shapes, 1)
        for name, x in own[0].items():
            gradients[name].assign(x)
        before = kept()
        if number == 2:  # which the next step finds out
            failing("a", "b")
        if number == 3:  # of another graph, whose plan the next step does not use
            failing("b")
        if number == 4:  # which somebody who looks at states must say
            failing("a", "b")
            ranks.scratch[0]["memory"].abandon()
            tf.nest.map_structure(np.testing.assert_array_equal, kept(), before)
        if number == 5:  # before the number of ranks becomes another one
            failing("a", "b")
            for plan in ranks.scratch[0].values():
                if isinstance(plan, dict):
                    plan["size"] = 2
            step = tf.function(exchange, autograph=False)
        if number == 6:
            gc.collect()
            places = in_memory()
        means, [others] = step("a", "b"), expected(own)
        for name, state in kept().items():
            assert_equal(Outcome(means[name].numpy(), None, state), others[name])
    assert in_memory() == places


def test_what_is_summed_first_may_take_the_place_of_its_rows():
    method, shapes = PowerSGD(rank=2, min_compression_rate=1), {"a": (50, 40)}
    exchange = Ranks(method, shapes, 1, in_place=True).begun(0, {"a": np.ones((50, 40), "f4")})
    first = next(exchange)
    assert (first.owned, exchange.send(first.array).owned) == (True, False)


@pytest.mark.parametrize("circumstance", ["in place", "without a compiler", "from a checkpoint"])
@pytest.mark.parametrize("method", [*METHODS[:2], *CODED], ids=repr)
def test_circumstances_change_no_bit(method, circumstance, monkeypatch):
    """The result takes the place of the gradient; loops are NumPy's; and a checkpoint takes that of
    the state, whatever copy was kept beside it."""
    shapes, random = {"a": (50, 40), "b": (30, 30)}, np.random.default_rng(0)
    is_in_place = circumstance == "in place"
    ranks, expected = Ranks(method, shapes, 2, in_place=is_in_place), one_by_one(method, 2)
    if circumstance == "without a compiler":
        monkeypatch.setattr(kernels, "is_compiled", lambda: False)
    for step in range(4):
        if circumstance == "from a checkpoint" and step == 2:
            saved = copy.deepcopy(ranks.states)
            for _ in range(2):
                ranks.exchange(gradients_of(random, shapes, 2))
            ranks.states, ranks.step = saved, step
        gradients = gradients_of(random, shapes, 2)
        other = expected(copy.deepcopy(gradients))
        found = ranks.exchange(gradients)
        assert_all_equal(found, other)
        if is_in_place and "clip" not in repr(method):  # whose result is another array
            for own, given_ in zip(found, gradients, strict=True):
                assert all(np.shares_memory(own[n].direction, x) for n, x in given_.items())


def test_other_entries_of_the_state_stay_out_of_it():
    """Bindings keep arrays of their own there, and may replace them meanwhile."""
    reducer, gradient = Reducer(METHODS[0], LocalEngine(), in_place=True), np.ones((50, 40), "f4")
    for step in range(4):
        reducer.start("a", gradient.copy())
        if step:
            reducer.store.states["a"]["decay"] = np.full(2000, step, np.float32)
        reducer.finish()
        expected = {"velocity", "residual", *(["decay"] if step else [])}
        assert reducer.store.states["a"].keys() == expected
        assert not step or (reducer.store.states["a"]["decay"] == step).all()


def test_a_bucket_is_of_the_device_that_it_was_made_on():
    """If a model has moved, the method is asked again."""
    ranks, gradient = Ranks(QSGD(), {"a": (50, 40)}, 1), torch.ones(50, 40)
    ranks.exchange([{"a": gradient}])
    (plan,), step = ranks.plans[0].values(), ranks.context(0)
    assert plan.takes(Tensors([gradient], [{}], "", [0.0]))
    assert not plan.takes(Tensors([gradient.to("meta")], [{}], "", [0.0]))
    ranks.exchange([{"a": gradient}])
    assert [*ranks.plans[0].values()] == [plan]
    place = QSGD().place(gradient, step)
    moved = place._replace(key=("elsewhere", torch.device("meta")))
    assert plan_for([PlacedTensor("a", gradient, {}, moved, 0.0)], step, plan) is not plan


@pytest.mark.parametrize(
    ("method", "states"),
    [
        *((PowerSGD(rank=2), 1), (QSGD(), 0), (TopK(density=0.001), 1)),
        (DGC(density=0.001), 2 + 1),  # with the old velocities of a bucket, which is all here
        *((EF21(density=0.001), 2), (RandomK(density=0.01), 1), (Signum(), 1)),
        # With the sums of a rank's own shards, which are all of one rank's.
        (OneBitAdamCompression(freeze_step=True), 3 + 1),
    ],
    ids=repr,
)
def test_the_first_step_needs_memory_for_states_and_messages_alone(method, states):
    """And none for what was sent, which nobody looks at; nor for a second set of states."""
    random, n = np.random.default_rng(0), 2_000_000
    reducer = Reducer(method, LocalEngine(), in_place=True)
    gradients = {f"t{i}": random.standard_normal((200, n // 2000), np.float32) for i in range(10)}
    tracemalloc.start()
    reducer.reduce(gradients)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < (states + 0.4) * 4 * n
    for record in reducer.records.values():
        assert record.elements == n // 10
        assert record.elements_sent == record.elements * getattr(method, "density", 1)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("method", CODED[:5], ids=repr)
def test_after_another_number_of_ranks_nothing_is_lost(method, make):
    """The residual of shards that are others' now goes along with its next message."""
    shapes, random = {"a": (50, 40), "b": (300,)}, np.random.default_rng(0)
    fewer, blocks = two_of_three(method, shapes, random, make)
    for step in range(3):
        if step == 1:  # as a broadcast does: the array is the one from before
            state = fewer.states[1]["a"].get("owner_residual")
            if state is not None and make is torch.tensor:
                state += 0.25
                blocks.states["a"][1]["owner_residual"] += 0.25
        own = gradients_of(random, shapes, 2)
        expected = blocks.exchange_all(own, momentum=0.9)
        assert_all_equal(fewer.exchange(made(own, make)), expected)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (TopK(density=0.05), FP8()),
        (EFSignSGD(via="allgather"), TopK(density=0.05)),
        (TopK(density=0.05), TopK(density=0.05, values="float16")),
        (QSGD(), NaturalCompression()),
        (FP8(), PowerSGD(rank=2)),
    ],
    ids=repr,
)
def test_a_switch_takes_nothing_over_from_the_other_form(first, then):
    method, random = switch(first, then, start=2), np.random.default_rng(0)
    shapes = {"a": (50, 40), "b": (300, 3)}
    ranks, expected = Ranks(method, shapes, 2, in_place=True), World(method, 2)
    for _ in range(5):
        own = gradients_of(random, shapes, 2)
        other = expected.exchange_all(copy.deepcopy(own), momentum=0.9, gradient_norm=3.0)
        assert_all_equal(ranks.exchange(own), other)


@pytest.mark.parametrize("method", CODED, ids=repr)
def test_a_step_that_ends_early_leaves_states_as_they_were(method):
    shapes, random = {"a": (50, 40), "b": (30, 10)}, np.random.default_rng(0)
    ranks = Ranks(method, shapes, 2, in_place=True)
    ranks.exchange(gradients_of(random, shapes, 2))
    before, own = copy.deepcopy(ranks.states), gradients_of(random, shapes, 2)
    for rounds in itertools.count():
        given = copy.deepcopy(own)
        exchanges = [ranks.begun(rank, own) for rank, own in enumerate(given)]
        requests = [next(each) for each in exchanges]
        for _ in range(rounds):
            replies = [type(requests[0]).reply(requests, rank) for rank in range(2)]
            try:
                pairs = zip(exchanges, replies, strict=True)
                requests = [each.send(reply) for each, reply in pairs]
            except StopIteration:
                return
        for each in exchanges:
            each.close()
        np.testing.assert_equal(ranks.states, before)


@pytest.mark.parametrize("method", [FP8(), OneBit(via="allgather"), QSGD()], ids=repr)
def test_messages_of_another_size_and_of_other_options_are_noticed(method):
    """Changed bytes are those of tests/wire/test_gathered.py."""
    shapes = {"a": (8, 9), "b": (30,)}
    (own,) = gradients_of(np.random.default_rng(0), shapes, 1)

    def begun(method):
        exchange = Ranks(method, shapes, 2, in_place=True).begun(0, dict(own))
        return exchange, next(exchange).arrays[0]

    message = begun(method)[1].copy()
    other = dataclasses.replace(method, bucket=64) if hasattr(method, "bucket") else FP8(bucket=8)
    for theirs, words in (
        *(
            (each, "rank 1")
            for each in (message[:-8], message[:3], np.append(message, message[:8]))
        ),
        (begun(other)[1], "compression options"),
    ):
        with pytest.raises(PayloadError, match=words):
            begun(method)[0].send([message, theirs.copy()])


@pytest.mark.parametrize(
    "method",
    [
        *(DGC(density=0.001), DGC.compact(density=0.001), EF21(density=0.001), FP16()),
        *(RandomK(density=0.01), OneBitAdamCompression(freeze_step=True), Signum()),
        *CODED[:9],
        PowerSGD(rank=2, min_compression_rate=1),
    ],
    ids=repr,
)
def test_a_steady_step_of_torch_needs_no_large_blocks(method):
    """By PyTorch's profiler and tracemalloc; a sum needs its message, as large as the gradients in
    it, and float16 as much again for the result."""
    n = 2_000_000
    reducer = Reducer(method, LocalEngine(), in_place=True, momentum=0.9 * method.takes_momentum)
    torch.manual_seed(0)
    steps = [{"x": torch.randn(1000, n // 1000), "b": torch.randn(100)} for _ in range(6)]
    for gradients in steps[:4]:
        reducer.reduce(gradients)
    tracemalloc.start()
    reducer.reduce(steps[4])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    with torch.profiler.profile(profile_memory=True) as profile:
        reducer.reduce(steps[5])
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    if method.name == "fp16":
        assert 2 * n <= largest <= 4 * n + 1000
    else:
        assert largest < n * 4 / 10
    assert peak < n * 4 / 10
