"""Steps like the one before, in which the method is not asked again: the same bits and bytes."""

from __future__ import annotations

import dataclasses
import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_compress import (
    DGC,
    EF21,
    FP8,
    FP16,
    QSGD,
    After,
    NoCompression,
    OneBit,
    OneBitAdamCompression,
    PowerSGD,
    RandomK,
    Signum,
    TopK,
    partition,
    rule,
    switch,
    warmup_to,
)
from hvd_compress.base import Context
from hvd_compress.blocks import allgather, chain, error_feedback, top_k
from hvd_compress.engines.local import LocalEngine
from hvd_compress.methods.chained import Chained
from hvd_compress.reduce import MemoryStore, Reducer
from hvd_compress.schedules import StagedWarmup
from tests.method_table import ROWS
from tests.mutations import same


@dataclasses.dataclass(frozen=True)
class AsAuthorsWriteIt(Chained, name="test-as-authors-write-it"):
    """A chain as a class, which says nothing of whether its steps are alike."""

    @functools.cached_property
    def blocks(self):
        return chain(error_feedback(), via=allgather(top_k(0.02)))


SHAPES = {"a": (40, 30), "b": (30,), "c": (25, 50), "d": (7,), "e": (64, 20)}
METHODS = [
    DGC(density=0.02),
    DGC(density=warmup_to(0.01, steps=4)),
    DGC.compact(density=0.02),
    DGC(density=0.02, clip_norm=1.0),
    TopK(density=0.02, values="float16"),
    NoCompression(),
    FP16(),
    FP8(),
    OneBit(start=After("step", 3)),
    QSGD(),
    EF21(density=0.02, average=0.5),
    RandomK(),
    OneBitAdamCompression(freeze_step=2, min_size=100),
    Signum(),
    PowerSGD(rank=2, min_compression_rate=1),
    PowerSGD(start=After("step", 3)),
    PowerSGD(rank=3, error_feedback=False),
    PowerSGD(alternate=True),
    partition(rule(DGC(density=0.05), names="a"), otherwise=DGC(density=0.02)),
    switch(NoCompression(), TopK(density=0.02), start=3),
    switch(TopK(density=0.02), FP8(), start=3),
    switch(QSGD(), TopK(density=0.02), start=3),
    switch(TopK(density=0.02), TopK(density=0.02, values="float16"), start=3),
]


class Asking(MemoryStore):
    """Has the method asked in every step."""

    def circumstances(self):
        return None


def make(store, method):
    return Reducer(method, LocalEngine(), store=store(0.9 * method.takes_momentum), in_place=True)


def count_asked(reducer):
    asked = []
    original = reducer._entry

    def entry(name, *rest):
        asked.append(name)
        return original(name, *rest)

    reducer._entry = entry
    return asked


EVENTS = ("nothing", "nothing", "missing", "strided", "nan", "state", "order", "reset")


@pytest.mark.parametrize("of", [np.array, torch.tensor], ids=["numpy", "torch"])
@settings(max_examples=25)
@given(
    st.sampled_from(METHODS),
    st.lists(st.sampled_from(EVENTS), min_size=3, max_size=9),
    st.integers(0, 10**6),
)
def test_steps_are_as_if_the_method_was_asked(of, method, events, seed):
    random = np.random.default_rng(seed)
    reducers = [make(Asking, method), make(MemoryStore, method)]
    for event in events:
        names = list(SHAPES)
        if event == "missing":
            names.remove(random.choice(names))
        if event == "order":
            names = names[::-1]
        gradients = {n: random.standard_normal(SHAPES[n], np.float32) for n in names}
        odd = names[random.integers(len(names))]
        if event == "nan":
            gradients[odd].flat[3] = np.nan
        results = []
        for reducer in reducers:
            own = {n: of(g) for n, g in gradients.items()}
            if event == "strided":
                own[odd] = of(np.repeat(gradients[odd][..., None], 2, -1))[..., 0]
            states = reducer.store.states
            if event == "state" and states.get(odd):  # as when one is loaded by hand
                key = min(states[odd])
                states[odd] = {**states[odd], key: states[odd][key] * 2}
            if event == "reset":
                reducer.reset_stats()
            for name, gradient in own.items():
                reducer.start(name, gradient)
            results.append(reducer.finish())
        assert results[0].keys() == results[1].keys() == set(names)
        assert same(*results)
        assert reducers[0].records == reducers[1].records
        assert same(*(reducer.store.states for reducer in reducers))


@pytest.mark.parametrize(
    ("method", "asked_for"),
    [
        (DGC(density=0.02), 2),
        (DGC(density=warmup_to(0.01, steps=4)), 5),
        (DGC(density=0.02, clip_norm=1.0), 6),
        (FP16(), 2),
        (AsAuthorsWriteIt(), 2),
        (EF21(), 2),
        (RandomK(), 2),
        (OneBitAdamCompression(freeze_step=2, min_size=0), 4),
        (PowerSGD(), 2),
        (PowerSGD(start=After("step", 2)), 4),
        (partition(rule(TopK(density=0.05), names="a"), otherwise=TopK(density=0.02)), 2),
        (switch(NoCompression(), TopK(density=0.02), start=3), 6),
    ],
    ids=[
        "dgc",
        "warm-up",
        "clipped",
        "fp16",
        "as authors write it",
        "ef21",
        "randomk",
        "1-bit adam",
        "powersgd",
        "its start",
        "partition",
        "switch",
    ],
)
def test_the_method_is_asked_only_where_steps_may_differ(method, asked_for):
    reducer, steps = make(MemoryStore, method), []
    asked = count_asked(reducer)
    for _ in range(6):
        asked.clear()
        reducer.reduce({n: np.ones(s, np.float32) for n, s in SHAPES.items()})
        steps.append(len(asked))
    assert steps[asked_for:] == [0] * (6 - asked_for)
    assert all(n == len(SHAPES) for n in steps[:asked_for])


def run_both(method, steps):
    """The reducers that ask in every step and that do not, after the same steps."""
    reducers = [make(Asking, method), make(MemoryStore, method)]
    for number, gradients in enumerate(steps):
        results = [r.reduce({n: g.copy() for n, g in gradients.items()}) for r in reducers]
        for name in gradients:
            np.testing.assert_array_equal(results[0][name], results[1][name], err_msg=f"{number}")
            assert results[0][name].dtype == results[1][name].dtype == gradients[name].dtype
    assert reducers[0].records == reducers[1].records


def test_a_density_that_changes_while_a_tensor_is_missing():
    random = np.random.default_rng(0)
    steps = [
        {n: random.standard_normal(s, np.float32) for n, s in SHAPES.items()} for _ in range(7)
    ]
    del steps[4]["c"]  # the first step of the new density
    run_both(TopK(density=StagedWarmup("step", 4, (0.5, 0.02))), steps)


def test_a_tensor_that_changes_its_dtype():
    steps = [{n: np.full(s, 1 / 3, np.float32) for n, s in SHAPES.items()} for _ in "12345"]
    for gradients in steps[3:]:
        gradients["a"] = np.full(SHAPES["a"], 1 / 3)
    run_both(NoCompression(), steps)


def test_a_tensor_that_changes_its_shape():
    """Its columns have scales of their own."""
    random = np.random.default_rng(0)
    steps = [{n: random.standard_normal(s, np.float32) for n, s in SHAPES.items()} for _ in "12345"]
    for gradients in steps[3:]:
        gradients["a"] = gradients["a"].T.copy()
    run_both(OneBit(), steps)


@pytest.mark.parametrize("row", ROWS.values(), ids=[*ROWS])
def test_equal_steps_keep_their_buckets(row):
    """Tensors that ask for the same in every step, late in a training, are sent in the buckets that
    were planned: to plan again costs a message, and joins nothing."""
    random = np.random.default_rng(0)
    method = row.method
    momentum = 0.9 * (method.takes_momentum and method.momentum is None)
    reducer = Reducer(method, LocalEngine(), momentum=momentum)
    reducer.step, reducer.epoch, reducer.learning_rate = 1000, 1000.0, 0.1
    plans = []
    original = reducer.buckets._make_plan
    reducer.buckets._make_plan = lambda *args: (plans.append(reducer.step), original(*args))
    shapes = {**SHAPES, "f": (40, 30), "g": (30,)}
    for _ in range(5):
        reducer.reduce({n: random.standard_normal(s, np.float32) for n, s in shapes.items()})
    assert len(plans) <= 1, plans


def test_threads_that_share_a_method_make_one_form_of_it(monkeypatch):
    """Otherwise the tensors of a rank would be in buckets of two forms, and other ranks' in
    one's."""
    method, both = QSGD(), threading.Barrier(2, timeout=30)
    make = type(method.blocks.via).fused

    def make_at_once(*args):
        both.wait()
        return make(*args)

    monkeypatch.setattr(type(method.blocks.via), "fused", make_at_once)
    gradient = np.ones(8, np.float32)

    def form(rank):
        context = Context(rank=rank, size=2, in_place=True)
        return method.place(gradient.copy(), context).form

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(form, range(2))
    assert one is other
