"""Plans of buckets against the blocks of their tensors, and when they are made anew."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from hvd_compress import (
    DGC,
    FP8,
    FP16,
    LGC,
    QSGD,
    EFSignSGD,
    MomentumAfter,
    NoCompression,
    OneBit,
    RandomK,
    Threshold,
    TopK,
    partition,
    rule,
    switch,
)
from hvd_compress.engines.local import LocalEngine
from hvd_compress.engines.lockstep import World
from hvd_compress.reduce import MemoryStore, Reducer
from tests.kernels.buckets import gradients_of
from tests.kernels.test_old_states import Failing

SHAPES = {"a": (40, 30), "b": (30,), "c": (25, 50)}
METHODS = [
    DGC(density=0.05, min_size=0),
    DGC(density=0.05),
    *(MomentumAfter(part) for part in (QSGD(), TopK(density=0.1), RandomK(), FP8())),
    *(MomentumAfter(part) for part in (EFSignSGD(), Threshold(tau=0.5), NoCompression(), FP16())),
    partition(rule(DGC(density=0.05), names="a"), otherwise=QSGD()),
]
LAYOUTS = {
    "C": np.ascontiguousarray,
    "F": np.asfortranarray,
    "strided": lambda x: np.repeat(x[..., None], 2, -1)[..., 0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_reducer_gives_what_the_blocks_of_each_tensor_do(method, nesterov, layout):
    random, world = np.random.default_rng(0), World(method, 1)
    store = MemoryStore(0.9, nesterov)
    reducer = Reducer(method, LocalEngine(), store=store, in_place=True)
    for step in range(5):
        (gradients,) = gradients_of(random, SHAPES, 1)
        if step == 3:
            gradients["c"][3, 3] = np.nan
        expected = world.exchange_all([copy.deepcopy(gradients)], momentum=0.9, nesterov=nesterov)
        found = reducer.reduce({n: LAYOUTS[layout](x) for n, x in gradients.items()})
        for name, outcome in expected[0].items():
            np.testing.assert_array_equal(found[name], outcome.direction, err_msg=f"{step} {name}")
            for key, x in outcome.state.items():
                np.testing.assert_array_equal(np.ravel(store.states[name][key]), np.ravel(x))


class Two(Failing):
    """One of two ranks, the other of which has twice the gradients."""

    def _wait(self, op):
        return 3 * op.tensor if op.kind == "sum" else super()._wait(op)


@pytest.mark.parametrize("method", [NoCompression(), MomentumAfter(NoCompression())], ids=repr)
def test_sums_reach_gradients_of_every_layout(method):
    store = MemoryStore(0.5 * isinstance(method, MomentumAfter))
    reducer = Reducer(method, Two(), store=store, in_place=True)
    for _ in range(3):
        x = {n: np.asfortranarray(np.ones(s, np.float32)) for n, s in SHAPES.items()}
        last = reducer.reduce(x)
    expected = 1.5 * (1.75 if isinstance(method, MomentumAfter) else 1)
    for found in last.values():
        np.testing.assert_allclose(found, expected)


def test_another_rank_of_as_many_has_another_plan():
    engine, random = Failing(), np.random.default_rng(0)
    reducer = Reducer(OneBit(), engine, in_place=True)
    shapes = {"a": (64, 64), "b": (256, 8)}
    for rank in (0, 0, 0, 1):
        engine.rank = rank
        reducer.reduce(*gradients_of(random, shapes, 1))
        plans = [in_use.plan for in_use in reducer._plans.values()]
        assert all(plan.rank == rank for plan in plans)


@pytest.mark.parametrize(
    ("method", "sent"),
    [
        (switch("none", Threshold(tau=1.0), start=2), [1200, 1200, None, None]),
        (switch(Threshold(tau=1.0), "none", start=2), [None, None, 1200, 1200]),
    ],
    ids=["to a threshold", "from a threshold"],
)
def test_elements_are_counted_where_only_the_sender_knows_them(method, sent):
    reducer, random = Reducer(method, LocalEngine(), in_place=True), np.random.default_rng(0)
    for expected in sent:
        (gradients,) = gradients_of(random, SHAPES, 1)
        known = np.count_nonzero(np.abs(gradients["a"]) > 1) if expected is None else expected
        reducer.reset_stats()
        reducer.reduce(gradients)
        count = reducer.stats().layers["a"].elements_sent
        assert count == known or (expected is None and 0 < count < 1200)


def test_bytes_are_those_of_the_gradients_that_were_handed_in():
    reducer, random = Reducer(TopK(density=0.1), LocalEngine(), in_place=True), np.random
    for dtype, nbytes in ((np.float16, 200), (np.float16, 200), (np.float32, 400)):
        reducer.reset_stats()
        reducer.reduce({"a": random.default_rng(0).standard_normal((10, 10)).astype(dtype)})
        assert reducer.stats().layers["a"].dense_bytes == nbytes


def test_plans_of_other_buckets_are_forgotten_with_what_they_count():
    reducer, random = Reducer(TopK(density=0.1), LocalEngine()), np.random.default_rng(0)
    names = [f"{i}" for i in range(9)]
    for _ in range(40):
        here = [name for name in names if random.random() < 0.6] or names[:1]
        reducer.reduce({name: np.ones((10, 10), np.float32) for name in here})
    assert len(reducer._plans) <= len(names)
    assert sum(record.steps for record in reducer.records.values()) > 40


def test_the_states_of_before_are_kept_where_the_number_of_ranks_has_changed():
    engine = Failing()
    reducer = Reducer(TopK(density=0.1), engine, in_place=True)
    reducer.keep_undo()
    x = np.random.default_rng(0).standard_normal((10, 10)).astype(np.float32)
    reducer.reduce({"a": x.copy()})
    before = reducer.store.states["a"]["residual"].copy()
    engine.size = 3
    engine._wait = lambda op: np.concatenate([op.tensor] * 3) if "gather" in op.kind else op.tensor
    engine._split = lambda own, everything: np.split(everything, 3)
    reducer.reduce({"a": x.copy()})
    reducer.discard()
    np.testing.assert_array_equal(reducer.store.states["a"]["residual"], before)


@pytest.mark.filterwarnings("ignore::hvd_compress.errors.PoorFit")
def test_what_tensors_have_in_common_is_known_before_they_need_it():
    """A state from after a switch is loaded before it."""
    lgc = LGC(density=0.05, learn=1, code=4, momentum=0.9, nesterov=False)
    method, random = switch("none", lgc, start=2), np.random.default_rng(0)

    def step(reducer):
        reducer.reduce(*gradients_of(random, {"a": (64, 64), "b": (64, 64)}, 1))

    ahead, behind = (Reducer(method, LocalEngine(), momentum=0.9) for _ in "12")
    for _ in range(4):
        step(ahead)
    step(behind)
    behind.load_state_dict(ahead.state_dict())
    step(behind)
    assert behind.step == 5


def test_a_world_of_no_tensors_has_no_outcomes():
    assert World(TopK(), 2, fused=True).exchange_all([{}, {}]) == [{}, {}]


def test_tensors_in_other_steps_have_the_bits_of_their_blocks():
    worlds = World(QSGD(), 1), World(QSGD(), 1, fused=True)
    random = np.random.default_rng(0)
    x, y = (random.standard_normal((20, 10)).astype(np.float32) for _ in "12")
    found = []
    for world in worlds:
        world.exchange_all([{"a": x}])
        found.append(world.exchange_all([{"a": x, "b": y}])[0])
    for name in "ab":
        np.testing.assert_array_equal(found[0][name].direction, found[1][name].direction)
