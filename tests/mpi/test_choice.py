"""The choices of "auto": by the times of the algorithms, once for each kind of array."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_compress import Sparse, mpi
from hvd_compress.errors import ConfigError
from hvd_compress.mpi.collectives.dense import ALGORITHMS as DENSE
from hvd_compress.mpi.collectives.sparse import ALGORITHMS as SPARSE
from hvd_compress.mpi.transport.nodes import nodes_of
from tests.mutations import mutations
from tests.simulated_mpi import ORDERS, Simulation

times = st.lists(st.floats(1e-6, 1.0), min_size=3, max_size=3)
SIZES = (8, 1000, 100_000)


def model_of(points, size=4):
    """A model of given times."""
    pairs = {name: tuple(zip(SIZES, seconds, strict=True)) for name, seconds in points.items()}
    return mpi.CostModel(size, pairs)


def model_that_prefers(name, size):
    return model_of({each: 3 * [1.0 if each == name else 2.0] for each in DENSE}, size)


@given(points=st.fixed_dictionaries(dict.fromkeys(DENSE, times)), place=st.integers(0, 2))
def test_the_fastest_of_those_measured(points, place):
    model, n = model_of(points), SIZES[place]
    seconds = {name: row[place] for name, row in points.items()}
    for name, expected in seconds.items():
        assert model.seconds(name, n) == expected
    assert seconds[model.fastest(n)] == min(seconds.values())


@given(points=st.fixed_dictionaries(dict.fromkeys(DENSE, times)), n=st.integers(0, 10**9))
def test_between_and_beyond_the_sizes_measured(points, n):
    model = model_of(points)
    for name, (first, second, last) in points.items():
        got = model.seconds(name, n)
        if n <= SIZES[0]:
            assert got == first
        elif SIZES[1] <= n <= SIZES[2]:
            share = (n - SIZES[1]) / (SIZES[2] - SIZES[1])
            assert got == pytest.approx(second + share * (last - second))
        elif n > SIZES[2]:  # never less than the largest took
            assert got >= last


def test_what_was_not_measured_is_not_known():
    model = mpi.CostModel(4, {"ring": ((8, 1.0), (9, 1.0))})
    with pytest.raises(ConfigError, match=r"'direct' was not measured; \['ring'\] were"):
        model.fastest(1000)
    with pytest.raises(ConfigError, match=r"'allgather' was not measured; \[\] were"):
        model.fastest_sparse(1000)
    assert mpi.CostModel(1).seconds("direct", 1000) == 0.0


@given(points=st.fixed_dictionaries(dict.fromkeys(SPARSE, times)), place=st.integers(0, 2))
def test_the_fastest_sparse_sum_of_those_measured(points, place):
    pairs = {name: tuple(zip(SIZES, row, strict=True)) for name, row in points.items()}
    model, k = mpi.CostModel(4, sparse_points=pairs), SIZES[place]
    seconds = {name: row[place] for name, row in points.items()}
    assert {name: model.sparse_seconds(name, k) for name in SPARSE} == seconds
    assert seconds[model.fastest_sparse(k)] == min(seconds.values())


@pytest.mark.parametrize(
    ("points", "problem"),
    [
        ({"tree": ((8, 1.0), (9, 1.0))}, "'tree' is not one of"),
        ({"ring": ((8, 1.0),)}, "two or more ascending sizes"),
        ({"ring": ((9, 1.0), (8, 1.0))}, "two or more ascending sizes"),
        ({"direct": ((0, 1.0), (9, 1.0))}, "two or more ascending sizes"),
        ({"direct": ((8, 1.0), (9, float("nan")))}, "pairs of bytes and seconds"),
    ],
)
def test_points_that_are_none(points, problem):
    with pytest.raises(ConfigError, match=problem):
        mpi.CostModel(4, points)


def test_damaged_files_are_refused_or_are_models(tmp_path):
    dense = {"direct": ((8, 1e-5), (1024, 2e-5)), "ring": ((8, 1e-4), (1024, 1e-4))}
    model = mpi.CostModel(4, dense, {"allgather": ((16, 1e-4), (256, 2e-4))})
    path = tmp_path / "model.json"
    model.save(path)
    assert mpi.CostModel.load(path) == model
    text, refused = path.read_text(), 0
    for _, damaged in mutations(json.loads(text), 200):
        path.write_text(json.dumps(damaged, default=str))
        try:
            found = mpi.CostModel.load(path)
        except ConfigError:
            refused += 1
            continue
        assert all(found.seconds(name, 100) >= 0 for name in found.points)
        assert all(found.sparse_seconds(name, 100) >= 0 for name in found.sparse_points)
    assert refused > 100
    for cut in (0, 1, len(text) // 2):
        path.write_text(text[:cut])
        with pytest.raises(ConfigError, match="cost model"):
            mpi.CostModel.load(path)


def forms(rank):
    """Pairs of an array and of what ``out`` is, all of one shape and dtype."""
    x = np.arange(12, dtype=np.float32).reshape(3, 4) + rank
    both = np.concatenate([x.reshape(-1), np.zeros(4, np.float32)])
    front, back = both[:12].reshape(3, 4), both[4:].reshape(3, 4)
    front[:] = x
    yield x, None
    yield x, np.empty_like(x)
    yield x.copy(), "x"
    yield np.asfortranarray(x), None
    yield x, np.empty_like(x, order="F")
    yield np.repeat(x, 2, axis=1)[:, ::2], np.empty((3, 8), np.float32)[:, ::2]
    yield front, back  # they overlap
    yield (view := x.copy()), view[:]  # another object, the same memory


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_a_kind_that_was_seen_before(order, name, op):
    size = 3
    arrays = [np.arange(12, dtype=np.float32).reshape(3, 4) + rank for rank in range(size)]
    want = {"sum": np.sum, "mean": np.mean, "max": np.max}[op](arrays, axis=0)

    def rank():
        comm = mpi.Communicator(checks=0)
        comm.cost_model = model_that_prefers(name, size)
        for _ in range(2):
            for x, out in forms(comm.rank):
                target = x if isinstance(out, str) else out
                got = mpi.allreduce(x, op=op, out=target, comm=comm)
                assert target is None or got is target
                assert got.dtype == np.float32
                np.testing.assert_array_equal(got, want)

    Simulation(size, order).run(rank)


def test_another_model_is_another_choice():
    def rank():
        comm = mpi.Communicator(checks=0)

        def sent(**options):
            before = comm.bytes_sent
            mpi.allreduce(np.ones(6), comm=comm, **options)
            return comm.bytes_sent - before

        for name in ("halving_doubling", "ring", "halving_doubling"):
            comm.cost_model = model_that_prefers(name, comm.size)
            assert sent() == sent() == sent(algorithm=name)
        return sent(algorithm="ring"), sent(algorithm="halving_doubling")

    assert any(ring != halving for ring, halving in Simulation(3).run(rank))


def test_a_model_of_other_ranks_is_refused():
    """It was loaded from a file of a job of another size, and would choose by other times."""

    def rank():
        comm = mpi.Communicator(checks=0)
        with pytest.raises(ConfigError, match=r"measured on 4 ranks, and here are 3.*measure"):
            comm.cost_model = model_that_prefers("ring", 4)
        assert comm.cost_model is None

    Simulation(3).run(rank)


def test_duplicates_measure_once():
    def rank():
        comm = mpi.Communicator(checks=0)
        other = comm.duplicate()
        mpi.allreduce(np.ones(6), comm=other)
        assert comm.cost_model is other.cost_model is not None
        other.cost_model = model_that_prefers("ring", comm.size)
        assert comm.cost_model is other.cost_model

    Simulation(3).run(rank)


def test_a_read_only_array_is_not_written_to():
    def rank():
        comm = mpi.Communicator(checks=0)
        x = np.ones(6)
        x.flags.writeable = False
        for _ in range(2):
            np.testing.assert_array_equal(
                mpi.allreduce(x, algorithm="direct", comm=comm), np.full(6, 2)
            )
            with pytest.raises(ConfigError, match="read-only"):
                mpi.allreduce(np.ones(6), algorithm="direct", out=x, comm=comm)

    Simulation(2).run(rank)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("codec", ["int32", "packed"])
@pytest.mark.parametrize("nodes", [False, 1])
def test_a_sparse_sum_goes_by_the_largest_number_of_entries(order, codec, nodes):
    """Few entries are fastest by a split, many by an allgather; ranks bring different numbers of
    them, and none.  By way of nodes of one rank each it is the same."""
    size, n, few, many = 4, 100_000, 10, 3000
    seconds = {
        "split_allgather": ((few, 1.0), (many, 2.0)),
        "allgather": ((few, 2.0), (many, 1.0)),
    }
    counts = (few, few, many, many, few, few)

    def brought(rank, call):
        places = np.arange(counts[call] * rank // (size - 1)) * 7 + rank
        return Sparse(places, np.ones(places.size, np.float32))

    def rank():
        comm = mpi.Communicator(checks=0)
        comm.cost_model = mpi.CostModel(size, sparse_points=seconds)
        options = {"comm": comm, "indices": codec, "nodes": nodes}
        nodes_of(comm, 1)  # whose making is bytes
        sent, announced = [], 8 * (size - 1)
        for call in range(len(counts)):
            mine, before = brought(comm.rank, call), comm.bytes_sent
            total = mpi.sparse_allreduce(mine, n, **options).dense(n)
            want = np.zeros(n)
            for other in range(size):
                want[brought(other, call).indices] += 1
            np.testing.assert_array_equal(total, want)
            sent.append(comm.bytes_sent - before - announced)
        for call, name in enumerate(("split", "split", "all", "all", "split", "split")):
            name = {"all": "allgather", "split": "split_allgather"}[name]
            before = comm.bytes_sent
            mpi.sparse_allreduce(
                brought(comm.rank, call), n, comm=comm, indices=codec, algorithm=name
            )
            assert comm.bytes_sent - before == sent[call], (call, name)

    Simulation(size, order).run(rank)
