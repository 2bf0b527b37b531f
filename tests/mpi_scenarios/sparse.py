"""Sparse collectives against sums that NumPy makes of dense arrays."""

from __future__ import annotations

import functools
from unittest import mock

import numpy as np
from mpi4py import MPI

from hvd_compress import Sparse, mpi
from hvd_compress.errors import (
    CollectiveTimeout,
    ConfigError,
    MismatchError,
    PayloadError,
    UnsupportedError,
)
from hvd_compress.mpi.collectives import sparse_messages
from hvd_compress.mpi.collectives.sparse import ALGORITHMS
from hvd_compress.mpi.transport.channel import exchange
from hvd_compress.wire import encode_sparse, sparse_size
from tests.mpi_scenarios.common import (
    FLOATS,
    LAYOUTS,
    assert_same_everywhere,
    raises,
    refused,
    world,
)
from tests.scenarios import applies

CODECS = ("int32", "packed")
P, RANK = world.size, world.rank
SIZE, OVERHEAD = 8, 16 + 7  # bytes that go ahead of a frame; header and most padding


def vector(rank: int, n: int, k: int, dtype: str = "float32", seed: int = 0) -> Sparse:
    """The vector that ``rank`` brings; every rank can make everyone's."""
    generator = np.random.default_rng([seed, rank, n, k])
    indices = np.sort(generator.choice(n, k, replace=False))
    return Sparse(indices, generator.standard_normal(k).astype(dtype))


def _vectors(n: int, k: int, dtype: str = "float32", seed: int = 0) -> list[Sparse]:
    return [vector(rank, n, k, dtype, seed) for rank in range(P)]


def _sparse(indices: list[int], values: list[float], dtype: str = "float32") -> Sparse:
    return Sparse(np.array(indices, np.int64), np.array(values, dtype))


def _dense(vector: Sparse, n: int, dtype: str = "float64") -> np.ndarray:
    x = np.zeros(n, dtype)
    x[vector.indices] = vector.values
    return x


def _everyones(x: np.ndarray) -> np.ndarray:
    """The sum over the ranks, by MPI."""
    total = np.array(x, np.float64)
    world.Allreduce(MPI.IN_PLACE, total)
    return total


def _bits(x: Sparse | np.ndarray) -> list[np.ndarray]:
    return [x.indices, x.values] if isinstance(x, Sparse) else [x]


def _allreduces():
    """Every sparse allreduce."""
    for codec in CODECS:
        for algorithm in ALGORITHMS:
            yield functools.partial(mpi.sparse_allreduce, algorithm=algorithm, indices=codec)
        for number, across in zip(LAYOUTS, (*ALGORITHMS, "auto", "allgather"), strict=True):
            options = {"algorithm": across, "nodes": number, "indices": codec}
            yield functools.partial(mpi.sparse_allreduce, **options)


# -- allgather ---------------------------------------------------------------------------------


def allgather_gives_every_rank_everything() -> None:
    n = 3000
    for dtype in FLOATS:
        for codec in CODECS:
            # Counts differ; ranks 0, 3, 6 ... bring nothing.
            brought = [vector(rank, n, 50 * (rank % 3), dtype) for rank in range(P)]
            got = mpi.sparse_allgather(brought[RANK], n, indices=codec)
            assert len(got) == P
            for theirs, want in zip(got, brought, strict=True):
                assert theirs.values.dtype == dtype
                np.testing.assert_array_equal(theirs.indices, want.indices)
                np.testing.assert_array_equal(theirs.values, want.values)


def allgather_sends_one_frame_to_each_rank() -> None:
    comm = mpi.Communicator(world, checks=0)
    n, k = 100_000, 100 + RANK
    mine = vector(RANK, n, k)
    for codec in CODECS:
        before = comm.bytes_sent
        mpi.sparse_allgather(mine, n, comm=comm, indices=codec)
        frame = encode_sparse(mine.indices, mine.values, n, codec)
        assert comm.bytes_sent - before == (P - 1) * (SIZE + frame.nbytes)
    assert frame.nbytes < 0.75 * sparse_size(k, n, "float32")
    before = comm.bytes_sent
    mpi.sparse_allreduce(mine, n, algorithm="allgather", comm=comm)
    assert comm.bytes_sent - before == (P - 1) * (SIZE + sparse_size(k, n, "float32"))
    comm.free()


def allgather_rounds_to_the_dtype_on_the_wire() -> None:
    brought = [_sparse([0, 2, 4], [1 + 2.0**-12 * rank, 1e6, np.inf]) for rank in range(P)]
    for rank, theirs in enumerate(mpi.sparse_allgather(brought[RANK], 5, values="float16")):
        assert theirs.values.dtype == np.float32
        rounded = np.float16(1 + 2.0**-12 * rank)
        np.testing.assert_array_equal(theirs.values, np.float32([rounded, 65504, np.inf]))


# -- exact allreduces --------------------------------------------------------------------------


def allreduces_give_the_dense_sum() -> None:
    for n, k in ((1000, 20), (1000, 400), (2, 1)):
        for dtype in FLOATS:
            brought = _vectors(n, k, dtype)
            exact = sum(_dense(x, n) for x in brought)
            magnitude = sum(np.abs(_dense(x, n)) for x in brought)
            unit = np.finfo("float32" if dtype == "float16" else dtype).eps
            bound = P * unit * magnitude
            if dtype == "float16":
                bound += 2.0**-11 * np.abs(exact)
            kinds = set()
            for number, allreduce in enumerate(_allreduces()):
                op, scale = (("sum", 1), ("mean", P))[number % 2]
                result = allreduce(brought[RANK], n, op=op)
                kinds.add(type(result.total))
                got = result.dense(n)
                assert got.dtype == dtype
                more = 2.0**-11 * np.abs(exact) + 2.0**-24 * P if op == "mean" else 0
                assert (np.abs(got.astype(np.float64) * scale - exact) <= bound + more).all()
                assert result.dropped.indices.size == 0
                assert result.dropped.values.dtype == max(dtype, "float32")
                assert_same_everywhere(*_bits(result.total))
            if k == 20:
                assert kinds == {Sparse} or 20 * P > 300


def vectors_become_dense_when_that_is_shorter() -> None:
    """n / 2 places for float32 with int32, n / 3 for float16."""
    n = 24 * P
    for algorithm in ALGORITHMS:
        for dtype, most in (("float32", n // 2), ("float16", n // 3)):
            for count, kind in ((most, Sparse), (most + P, np.ndarray)):
                places = np.arange(RANK, n, P)[: count // P]  # all ranks' places differ
                mine = Sparse(places, np.ones(places.size, dtype))
                total = mpi.sparse_allreduce(mine, n, algorithm=algorithm).total
                assert isinstance(total, kind), (algorithm, dtype, count, total)
                same = Sparse(np.arange(count // P), np.ones(count // P, dtype))
                total = mpi.sparse_allreduce(same, n, algorithm=algorithm).total
                assert isinstance(total, kind if P == 1 else Sparse)
                assert (total if P == 1 and kind is np.ndarray else total.values).max() == P


def clustered_places() -> None:
    """One region is full, the others are empty: its owner sends it dense, the total is sparse."""
    n = 4 * P * P + 3
    start, stop = n * (P - 1) // P, n
    mine = Sparse(np.arange(start, stop), np.full(stop - start, RANK + 1.0))
    for allreduce in _allreduces():
        total = allreduce(mine, n)
        assert isinstance(total.total, Sparse) == (P > 1)
        want = np.zeros(n)
        want[start:] = sum(range(1, P + 1))
        np.testing.assert_array_equal(total.dense(n), want)


def halves_are_rounded_once() -> None:
    """In float16, 2048 + 1 is 2048, however often."""
    mine = _sparse([3], [2048 if RANK == 0 else 1], "float16")
    total = np.float32(2048 + P - 1)
    for allreduce in _allreduces():
        assert allreduce(mine, 9).dense(9)[3] == np.float16(total)
        assert allreduce(mine, 9, op="mean").dense(9)[3] == np.float16(total / np.float32(P))


def nan_and_inf_reach_every_rank() -> None:
    for dtype in FLOATS:
        mine = vector(RANK, 100, 20, dtype)
        if RANK == P - 1:
            mine.values[[3, 9]] = np.nan, -np.inf
        culprit = world.bcast(mine.indices, P - 1)
        for options in ({}, {"values": "float16"}):
            for allreduce in _allreduces():
                got = allreduce(mine, 100, **options)
                dense = got.dense(100)
                assert np.isnan(dense[culprit[3]])
                assert np.isneginf(dense[culprit[9]])
                assert np.isfinite(np.delete(dense, culprit[[3, 9]])).all()
                assert np.isfinite(got.dropped.values).all()
                assert_same_everywhere(*_bits(got.total))
    both = _sparse([4], [np.inf if RANK % 2 else -np.inf])
    for allreduce in _allreduces():
        value = allreduce(both, 9).dense(9)[4]
        assert np.isnan(value) if P > 1 else np.isneginf(value)


def split_stays_below_its_bound() -> None:
    """k (P-1)/P entries to owners, and the union of all to the others."""
    comm = mpi.Communicator(world, checks=0)
    n, k = 50_000, 400
    mine, places = vector(RANK, n, k), [x.indices for x in _vectors(n, k)]
    union = len(np.unique(np.concatenate(places)))
    bounds = [n * i // P for i in range(P + 1)]
    own = sum(((x >= bounds[r]) & (x < bounds[r + 1])).sum() for r, x in enumerate(places))
    moved = P * k - own + (P - 1) * union
    for codec in CODECS:
        before = comm.bytes_sent
        mpi.sparse_allreduce(mine, n, algorithm="split_allgather", comm=comm, indices=codec)
        sent = world.allreduce(comm.bytes_sent - before)
        overhead = 2 * P * (P - 1) * (SIZE + OVERHEAD)
        assert sent <= {"int32": 8, "packed": 6}[codec] * moved + overhead
    comm.free()


def auto_follows_the_cost_model() -> None:
    comm = mpi.Communicator(world, checks=0)
    n = 4096
    few, many = vector(RANK, n, 4 + RANK), vector(RANK, n, n // 2 - RANK)
    points = dict.fromkeys(ALGORITHMS, ((n // 4, 2.0), (n // 3, 2.0)))
    points |= {"allgather": ((4, 1.0), (n // 2, 3.0)), "split_allgather": ((4, 3.0), (n // 2, 1.0))}
    comm.cost_model = mpi.CostModel(P, sparse_points=points)
    for mine, name in ((few, "allgather"), (many, "split_allgather")):
        before = comm.bytes_sent
        auto = mpi.sparse_allreduce(mine, n, comm=comm)
        taken = comm.bytes_sent - before - SIZE * (P - 1)
        before = comm.bytes_sent
        named = mpi.sparse_allreduce(mine, n, comm=comm, algorithm=name)
        assert P == 1 or taken == comm.bytes_sent - before
        for got, want in zip(_bits(auto.total), _bits(named.total), strict=True):
            np.testing.assert_array_equal(got, want)
    comm.free()
    # And with what is measured: some algorithm, the same everywhere.
    for mine in (few, many):
        for codec in CODECS:
            total = mpi.sparse_allreduce(mine, n, indices=codec).dense(n)
            np.testing.assert_allclose(total, _everyones(_dense(mine, n)), atol=1e-5)
            assert_same_everywhere(total)


# -- what users see ----------------------------------------------------------------------


def inputs_are_left_alone() -> None:
    mine, copy = vector(RANK, 100, 30), vector(RANK, 100, 30)
    for array in mine:
        array.flags.writeable = False
    for allreduce in _allreduces():
        result = allreduce(mine, 100, values="float16")
        result.dense(100)[:] = 7
        for array in _bits(result.total) + _bits(result.dropped):
            array[:] = 0
    for theirs in mpi.sparse_allgather(mine, 100):
        theirs.values[:] = 0
    np.testing.assert_array_equal(mine.indices, copy.indices)
    np.testing.assert_array_equal(mine.values, copy.values)


def refusals_name_the_way_out() -> None:
    mine = _sparse([1, 4], [1, 2])
    allreduce, allgather = mpi.sparse_allreduce, mpi.sparse_allgather
    whole = Sparse(np.arange(2), np.arange(2))
    unequal = Sparse(np.arange(2), np.ones(3)), Sparse(np.zeros((1, 1), int), np.ones((1, 1)))
    refused(
        ConfigError,
        (lambda: allreduce(mine, 5, algorithm="ring"), "algorithm", "split_allgather"),
        (lambda: allreduce(mine, 5, op="max"), "op", "mean"),
        (lambda: allgather(mine, 5, indices="bitmap"), "indices", "packed"),
        (lambda: allgather(mine, 5, values="bfloat16"), "values", "float16"),
        (lambda: allgather(mine, 5, values="float64"), "values='float64' is wider", "float32"),
        (lambda: allreduce(Sparse(np.ones(1), np.ones(1)), 5), "float64", "integers"),
        (lambda: mpi.Reduced(np.zeros(5), mine).dense(6), "n=6", "5 elements"),
        *((lambda x=x: allreduce(x, 5), "one length") for x in unequal),
        *((lambda n=n: allreduce(mine, n), "n=", "number of elements") for n in (-1, 2.5, True)),
        *(
            (lambda i=indices: allreduce(_sparse(i, [1, 2]), 5), "ascending", r"0\.\.4")
            for indices in ([1, 5], [-1, 3], [3, 1], [2, 2])
        ),
    )
    refused(UnsupportedError, (lambda: allreduce(whole, 5), "int64", "float32"))


@applies(least=2)
def differing_calls_are_errors_everywhere() -> None:
    odd, mine = RANK == P - 1, _sparse([1], [1])
    comm = mpi.Communicator(world, timeout=20)
    allreduce = functools.partial(mpi.sparse_allreduce, mine, comm=comm)
    values, algorithm = "float16" if odd else None, "auto" if odd else "allgather"
    refused(
        MismatchError,
        (lambda: allreduce(6 if odd else 5), r"\[5\]", r"\[6\]"),
        (lambda: allreduce(5, algorithm=algorithm), "allgather", "auto"),
        (lambda: mpi.sparse_allgather(mine, 5, values=values, comm=comm), "float32", "float16"),
    )
    assert allreduce(5).dense(5).tolist() == [0, P, 0, 0, 0]
    comm.free()


def damage_is_noticed_by_all_who_read_it() -> None:
    comm = mpi.Communicator(world, timeout=20)

    def damaged(*args):
        frame = encode_sparse(*args)
        frame[-9] ^= 16
        return frame

    honest = sparse_messages.encode_sparse
    encode = damaged if RANK == P - 1 else honest
    with (
        mock.patch.object(sparse_messages, "encode_sparse", encode),
        raises(PayloadError, f"rank {P - 1}", "checksum"),
    ):
        mpi.sparse_allgather(vector(RANK, 100, 10), 100, comm=comm)
    with raises(CollectiveTimeout, "broken", "checksum"):
        mpi.sparse_allgather(vector(RANK, 100, 10), 100, comm=comm)
    comm.free()


@applies(least=2)
def announced_sizes_are_checked() -> None:
    comm = mpi.Communicator(world, timeout=20)
    peer = (RANK + 1) % P
    source = (RANK - 1) % P
    frame = {peer: np.zeros(32, np.uint8)}
    with raises(PayloadError, f"rank {source}", "32 bytes", "31"):
        algorithm = exchange(comm.channel(), frame, [source], "a test", limit=31)
        comm.run("a test", algorithm)
    comm.free()
