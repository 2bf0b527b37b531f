"""Collectives that a method names: every one of them under the engine, in buckets, with the same
result on all ranks."""

from __future__ import annotations

import functools

import numpy as np

from hvd_compress import TopK, as_compressor, mpi
from hvd_compress.blocks import allgather, allreduce, chain, error_feedback, ok_topk, top_k
from hvd_compress.mpi.collectives import choosing
from hvd_compress.requests.algorithms import SPARSE_SUMS, SUMS
from tests.mpi_scenarios.common import SHAPES as SMALL
from tests.mpi_scenarios.common import (
    follows_the_lockstep_world,
    gradients_of,
    raises,
    world,
)
from tests.scenarios import applies

#: of which the second weight is sent in several blocks
SHAPES = SMALL | {"w2": (300, 20)}
_gradients = functools.partial(gradients_of, shapes=SHAPES)
_follows = functools.partial(follows_the_lockstep_world, shapes=SHAPES)


def dense_sums_by_every_algorithm() -> None:
    for algorithm in SUMS:
        for wire in (None, "float16"):
            method = chain(via=allreduce(wire=wire, algorithm=algorithm))
            _follows(method, tolerance=1e-6 if wire is None else 2e-3)


def sparse_sums_by_every_algorithm() -> None:
    for algorithm in SPARSE_SUMS:
        via = allgather(top_k(0.05), algorithm=algorithm)
        for bucket_bytes in (1, 10**9):
            method = chain(error_feedback(), via=via)
            _follows(method, tolerance=1e-6, bucket_bytes=bucket_bytes)


@applies(least=2)  # alone, nothing leaves
def bytes_of_sparse_sums_are_those_that_left() -> None:
    via = allgather(top_k(0.05), algorithm="split_allgather")
    reducer = mpi.Reducer(chain(error_feedback(), via=via))
    comm = reducer.engine.comm

    def step(number: int) -> tuple[int, int]:
        """Bytes that left in a step, and those that were counted."""
        left, counted = comm.bytes_sent, reducer.stats().total.bytes_sent
        everything = _gradients(world.rank, number)
        reducer.reduce({name: everything[name] for name in ("w1", "w2")} if number else {})
        return comm.bytes_sent - left, reducer.stats().total.bytes_sent - counted

    step(1)  # and the plan of the buckets
    comm.checks = 0
    left, counted = step(2)
    without, nothing = step(0)  # the ranks compare what they are about to do
    assert nothing == 0 < counted == left - without, (left, counted, without)


@applies(least=3)  # there would be one node
def by_way_of_nodes() -> None:
    """Nodes of two ranks, the last one of one if ranks are odd."""
    honest = choosing.nodes_of
    choosing.nodes_of = lambda comm, nodes=True: honest(comm, 2)
    try:
        for wire in (None, "float16"):
            method = chain(via=allreduce(wire=wire, algorithm="hierarchical"))
            _follows(method, tolerance=1e-6 if wire is None else 2e-3)
        for bucket_bytes in (1, 10**9):
            method = TopK(density=0.05, algorithm="hierarchical")
            _follows(method, tolerance=1e-6, bucket_bytes=bucket_bytes)
    finally:
        choosing.nodes_of = honest


@applies(least=2)
def oktopk_sends_less_than_six_k() -> None:
    """6 k (P-1)/P values and indices of 4 bytes in steps that use a threshold of the past."""
    n, k, size = 40_000, 800, world.size
    sent = {}
    for wire in (("int32", "float32"), ("packed", "float32"), ("packed", "float16")):
        reducer = mpi.Reducer(chain(via=ok_topk(k / n, indices=wire[0], values=wire[1])))
        for step in range(4):
            x = np.random.default_rng([world.rank, step]).standard_normal(n, np.float32)
            before = reducer.engine.comm.bytes_sent
            reducer.reduce({"w": x})
            sent[wire] = reducer.engine.comm.bytes_sent - before
            # Sizes and headers, borders of regions, and what ranks compare before a step.
            overhead = (size - 1) * (2 * (8 + 23) + 2 * 8 + 256)
            assert step == 0 or sent[wire] <= 4 * 6 * k * (size - 1) / size + overhead
    plain, packed, halves = sent.values()
    assert halves < packed < plain


def a_method_by_name() -> None:
    for text in ("none:algorithm=ring", "dgc:density=0.05,algorithm=split_allgather"):
        _follows(as_compressor(text), tolerance=1e-6)
    reducer = mpi.Reducer("oktopk:density=0.02")
    first = reducer.reduce(_gradients(world.rank, 0))
    assert 0 < np.count_nonzero(first["w2"]) <= 120  # k of the sums
    with raises(ValueError, "algorithm"):
        allgather(top_k(0.1), algorithm="ring")
