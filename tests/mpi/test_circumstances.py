"""Circumstances of one rank change nothing: where its arrays lie, whether it wants the result in
one of its own, what it has called before.  All ranks get the same bits, or all raise."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_compress import Sparse, mpi
from hvd_compress.backends import halves
from hvd_compress.errors import CompressionError, ConfigError, MismatchError
from hvd_compress.mpi.collectives.dense import ALGORITHMS
from hvd_compress.mpi.collectives.dense_running import blocks
from hvd_compress.mpi.transport.handles import Family
from hvd_compress.requests.algorithms import DENSE as REQUESTED
from tests.mpi.test_simulated import assert_same, entries, numbers, orders
from tests.simulated_mpi import Simulation

SHAPE = 3, 5


def strided(x):
    """A view of every other element of an array."""
    twice = np.empty((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)[..., ::2]
    twice[...] = x
    return twice


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


def transposed(x):
    """The same elements, the other way round in memory."""
    return np.asfortranarray(x.reshape(-1, 1) if x.ndim < 2 else x).reshape(x.shape, order="A")


#: how a rank may have its array
ARRAYS = {
    "plain": lambda x: x.copy(),
    "strided": strided,
    "read-only": read_only,
    "column by column": transposed,
    "a tensor": lambda x: torch.from_numpy(x.copy()),
}


def another(x):
    return torch.empty_like(x) if isinstance(x, torch.Tensor) else np.empty(x.shape, x.dtype)


def another_strided(x):
    if isinstance(x, torch.Tensor):
        return torch.empty(*x.shape, 2, dtype=x.dtype)[..., 0]
    return strided(x)


#: and where it wants the result
OUTS = {
    "a new array": lambda x: None,
    "in place": lambda x: x,
    "in another array": another,
    "in a strided one": another_strided,
}
circumstances = st.tuples(st.sampled_from([*ARRAYS]), st.sampled_from([*OUTS]))

DENSE = {
    **{name: functools.partial(mpi.allreduce, algorithm=name) for name in ALGORITHMS},
    "auto": mpi.allreduce,
    "hierarchical": lambda x, **more: mpi.allreduce(x, nodes=2, algorithm="ring", **more),
}


def outcome(call, read):
    try:
        return [read(call())]
    except CompressionError as error:
        return error


def all_alike(results):
    """The ranks hold the same bits, or all have an error."""
    assert len({isinstance(result, CompressionError) for result in results}) == 1, results
    if not isinstance(results[0], CompressionError):
        assert_same(results)


@pytest.mark.parametrize("checks", [0, 20])
@pytest.mark.parametrize("name", DENSE)
@settings(max_examples=6)
@given(data=st.data())
def test_dense(name, checks, data):
    """Long arrays are sent in blocks, and the calls of short ones are remembered."""
    size = data.draw(st.sampled_from([2, 3, 4]))
    n = data.draw(st.sampled_from([1, 15, 40, 700]))
    dtype = data.draw(st.sampled_from(["float32", "float16", "int32"]))
    how = data.draw(
        st.lists(st.lists(circumstances, min_size=4, max_size=4), min_size=1, max_size=4)
    )

    def rank():
        comm = mpi.Communicator(checks=checks)
        results = []
        for step, of_ranks in enumerate(how):
            kind, where = of_ranks[comm.rank]
            x = ARRAYS[kind](numbers(comm.rank, 5 * n, dtype, step).reshape(5, n))
            out = OUTS[where](x)
            call = functools.partial(DENSE[name], x, out=out, comm=comm, chunk=64)
            results.append(outcome(call, np.asarray))
            if isinstance(results[-1], CompressionError):  # and from here on without the others
                break
        return results

    # Without checks, whoever has an error of its own leaves the others waiting.
    if not checks:
        how = [[(k, w) if k != "read-only" else (k, "a new array") for k, w in row] for row in how]
    simulation = Simulation(size, *data.draw(orders))
    for step, results in enumerate(zip(*simulation.run(rank), strict=True)):
        all_alike(results)
        if not isinstance(results[0], CompressionError):
            want = sum(numbers(rank, 5 * n, dtype, step).astype("f8") for rank in range(size))
            np.testing.assert_array_equal(results[0][0], want.astype(dtype).reshape(5, n))


@pytest.mark.parametrize("name", ["allreduce", "hierarchical", "allgather"])
@settings(max_examples=4)
@given(data=st.data())
def test_sparse_calls(name, data):
    size = data.draw(st.sampled_from([2, 3, 4]))
    n = 60
    how = data.draw(st.lists(st.sampled_from([*ARRAYS]), min_size=4, max_size=4))
    bad = data.draw(st.sampled_from([None, *range(size)]))

    def rank():
        comm = mpi.Communicator()
        mine, as_rank = entries(comm.rank, n, 9), ARRAYS[how[comm.rank]]
        x = Sparse(as_rank(mine.indices), as_rank(mine.values))
        if comm.rank == bad:
            x = Sparse(x.indices, np.ones(9, int))  # no floats
        call = {
            "allreduce": lambda: mpi.sparse_allreduce(x, n, comm=comm),
            "hierarchical": lambda: mpi.sparse_allreduce(x, n, comm=comm, nodes=2),
            "allgather": lambda: mpi.sparse_allgather(x, n, comm=comm),
        }[name]

        def read(result):
            if name == "allgather":
                return np.concatenate([np.asarray(part.values) for part in result])
            return np.asarray(result.dense(n))

        return outcome(call, read)

    results = Simulation(size, *data.draw(orders)).run(rank)
    all_alike(results)
    assert isinstance(results[0], CompressionError) == (bad is not None)


def test_garbage_may_be_collected_while_a_rank_looks_at_what_it_has_dropped():
    class Owner:
        pass

    class Looked:
        has_broken = property(lambda self: bool(owners.clear()))

    family, owners = Family(), [Owner(), Owner(), Owner()]
    for owner in owners:
        family.add(owner, Looked())
    del owner, owners[0]
    assert family.dropped() == [0]
    assert family.dropped() == [0, 1, 2]


def test_the_others_hear_what_is_wrong_on_one():
    def rank():
        comm = mpi.Communicator()
        x = read_only(np.ones(3))
        error = outcome(
            lambda: mpi.allreduce(x, out=x if comm.rank == 1 else None, comm=comm), np.asarray
        )
        after = mpi.allreduce(np.ones(3), comm=comm)  # which is as usable as before
        assert (after == 3).all()
        return error

    first, second, third = Simulation(3).run(rank)
    assert isinstance(second, ConfigError)
    for error in (first, third):
        assert isinstance(error, MismatchError)
        assert "rank 1: ConfigError: out is read-only" in str(error)


@pytest.mark.parametrize("name", [*REQUESTED])
@settings(max_examples=6)
@given(data=st.data())
def test_float32_is_rounded_before_or_on_its_way(name, data):
    """Ranks round whole arrays beforehand, or leave it to the blocks: with the same bits."""
    size = data.draw(st.sampled_from([1, 2, 3, 5]))
    n = data.draw(st.sampled_from([0, 1, 17, 200, 1500]))
    dtype = data.draw(st.sampled_from(["float16", "bfloat16"]))
    early = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    narrow = np.float16 if dtype == "float16" else np.uint16

    def rank():
        comm = mpi.Communicator(checks=0)
        x = np.random.default_rng(comm.rank).standard_normal(n).astype(np.float32)
        kept, own = x.copy(), x
        if early[comm.rank]:
            halves.narrow(x, own := np.empty(n, narrow))
        out = np.empty_like(own)
        comm.run("a sum", *blocks(comm, ALGORITHMS[name], own, dtype, out, "sum", chunk=64))
        np.testing.assert_array_equal(x, kept)
        if out.dtype != np.float32:
            halves.widen(out, wide := np.empty(n, np.float32))
            return (wide,)
        return (out,)

    results = Simulation(size, *data.draw(orders)).run(rank)
    assert_same(results)
    if size == 1:  # rounded all the same
        x = np.random.default_rng(0).standard_normal(n).astype("f4")
        halves.narrow(x, h := np.empty(n, narrow))
        halves.widen(h, want := np.empty(n, np.float32))
        np.testing.assert_array_equal(results[0][0], want)
    exact = sum(np.random.default_rng(r).standard_normal(n).astype("f4") for r in range(size))
    np.testing.assert_allclose(results[0][0], exact, rtol=0.05, atol=0.05 * size)
