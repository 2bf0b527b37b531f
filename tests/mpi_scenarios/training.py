"""The NumPy path: the bits of the lockstep world, in any order, with any buckets; checkpoints."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from hvd_compress import (
    DGC,
    OneBit,
    mpi,
    warmup_to,
)
from hvd_compress.base import Outcome
from hvd_compress.engines import lockstep
from hvd_compress.errors import ConfigError, MismatchError
from hvd_compress.requests import Gather, Max, Sum
from tests.method_table import ROWS
from tests.mpi_scenarios.common import (
    SHAPES,
    assert_same_everywhere,
    follows_the_lockstep_world,
    gradients_of,
    raises,
    refused,
    world,
)
from tests.scenarios import applies
from tests.stateless import Stateless

KINDS = (
    "none",
    "bf16",
    "topk",
    "dgc-clip-norm",
    "powersgd",
    "onebit",
    "qsgd",
    "topk-half",
    "oktopk",
    "lgc",
)


def same_bits_as_the_lockstep_world() -> None:
    # Every rank computes the lockstep world of all of them: of many, only each kind of request.
    for number, name in enumerate(ROWS if world.size <= 2 else KINDS):
        row = ROWS[name]
        momentum = row.context.get("momentum", 0.0)
        if not row.method.takes_momentum or getattr(row.method, "momentum", None):
            momentum = 0.0
        nesterov = row.context.get("nesterov", False)
        variants = (("float32", 3000), ("float16", 10**9), ("float64", 1))
        dtype, nbytes = variants[number % len(variants)]
        options = {"momentum": momentum, "nesterov": nesterov, "comm": _comm()}
        follows_the_lockstep_world(row.method, dtype=dtype, bucket_bytes=nbytes, **options)


def double_buffering_keeps_a_residual_a_buffer() -> None:
    """Half-batch t is exchanged while half-batch t + 1 is computed, each by one of two reducers;
    the step is half a batch late."""
    method, shape = OneBit(column=16), (40, 30)
    buffers = [mpi.Reducer(method, comm=_comm()) for _ in range(2)]
    worlds = [lockstep.World(method, world.size) for _ in range(2)]

    def gradient(rank: int, half: int, weight: np.ndarray) -> np.ndarray:
        return weight - np.random.default_rng([rank, half]).normal(size=shape)

    weight = np.zeros(shape)
    expected, late = weight.copy(), None
    for half in range(9):
        buffers[half % 2].start("weight", gradient(world.rank, half, weight))
        everyones = [gradient(rank, half, expected) for rank in range(world.size)]
        if late is not None:
            weight = weight - 0.1 * buffers[1 - half % 2].finish()["weight"]
            expected = expected - 0.1 * late
        late = worlds[half % 2].exchange(everyones, "weight")[0].mean
        assert weight.tobytes() == expected.tobytes()
    buffers[0].finish()
    assert_same_everywhere(weight)


@functools.cache
def _comm() -> mpi.Communicator:
    return mpi.Communicator(world, checks=0)  # hundreds of reducers; checks have their own test


@applies(least=2)
def a_state_that_one_rank_alone_has_loaded_is_noticed() -> None:
    """Ranks at different steps would draw different elements, and drift apart."""
    for method in ("randomk:density=0.1", "oktopk"):
        reducer = mpi.Reducer(method)
        for step in range(2):
            reducer.reduce(gradients_of(world.rank, step))
        saved = reducer.state_dict()
        fresh = mpi.Reducer(method)
        if world.rank == 0:
            fresh.load_state_dict(saved)
        with raises(MismatchError, "  step", "rank 0: 2", ": 0"):
            fresh.reduce(gradients_of(world.rank, 2))
        for owner in (reducer, fresh):  # what has left cannot be called back
            owner.engine.close()
    with raises(MismatchError, "seed", "rank 0: 0"):
        mpi.Reducer("randomk", seed=int(world.rank > 0))


@dataclasses.dataclass(frozen=True)
class _Rounds(Stateless, name="test-mpi-rounds"):
    """Several rounds of all kinds, payloads of different sizes; the mean in a complicated way."""

    def exchange(self, gradient, state, context):
        largest = yield Max(np.abs(gradient).reshape(-1))
        parts = yield Gather(gradient.reshape(-1)[: context.rank + 1].copy().view(np.uint8))
        assert [part.nbytes for part in parts] == [
            min(rank + 1, gradient.size) * gradient.itemsize for rank in range(context.size)
        ]
        total = yield Sum(gradient)  # not flat
        half = yield Sum(gradient.reshape(-1), "bfloat16")
        assert (np.abs(half) <= context.size * largest * 1.01).all()
        return Outcome(total / context.size, gradient, state)


def several_rounds_of_all_kinds() -> None:
    for bucket_bytes in (1, 10**9):
        reducer = mpi.Reducer(_Rounds(), bucket_bytes=bucket_bytes)
        for step in range(3):
            everyones = [gradients_of(rank, step) for rank in range(world.size)]
            directions = reducer.reduce(everyones[world.rank])
            for name in SHAPES:
                total = everyones[0][name].copy()
                for gradients in everyones[1:]:
                    total += gradients[name]
                assert directions[name].tobytes() == (total / np.float32(world.size)).tobytes()


def refusals_name_the_way_out() -> None:
    reducer, one = mpi.Reducer("topk"), np.ones(10, np.float32)
    by_epoch = mpi.Reducer(DGC(density=warmup_to(0.001, epochs=2)))
    reducer.start("w", one)
    refused(
        ConfigError,
        (lambda: reducer.start("w", one), "w", "finish"),
        (lambda: mpi.Reducer("fp16", momentum=0.9), "fp16", "momentum"),
        (lambda: mpi.Reducer("topk", bucket_bytes=0), "bucket_bytes"),
        (lambda: by_epoch.reduce({"w": np.ones((9, 9))}), "set_epoch"),
    )
    reducer.finish()
