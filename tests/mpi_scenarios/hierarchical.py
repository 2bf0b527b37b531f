"""Hierarchical sums, on nodes that are made up and on those that there are: what dense.py and
sparse.py do not ask of every allreduce."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
from mpi4py import MPI

from hvd_compress import Sparse, mpi
from hvd_compress.errors import ConfigError, MismatchError
from hvd_compress.mpi.collectives.dense import ALGORITHMS
from hvd_compress.mpi.transport import nodes
from hvd_compress.mpi.transport.channel import Channel
from tests.mpi_scenarios.common import LAYOUTS, array, arrays, assert_same_everywhere, raises, world

P = world.size
WITHIN = Channel.within
CHUNK = 256  # bytes: several blocks, the last one not full


def _round_robin(comm: mpi.Communicator, number: int) -> None:
    """Make ``nodes=1000`` mean ``number`` nodes to which ranks are dealt in turn."""
    comm._nodes = {1000: nodes.Nodes(comm.rank, [rank % number for rank in range(P)])}


def ranks_may_be_dealt_to_nodes_in_turn() -> None:
    for number in range(1, min(P, 5) + 1):
        comm = mpi.Communicator(world)
        _round_robin(comm, number)
        for dtype in ("int64", "float32"):
            everyones = arrays(1001, dtype)
            got = mpi.allreduce(
                everyones[world.rank], comm=comm, nodes=1000, algorithm="ring", chunk=CHUNK
            )
            np.testing.assert_allclose(got, np.sum(everyones, 0), atol=1e-5 * P)
            assert_same_everywhere(got)
        comm.free()


def rounded_once_for_both_levels(half: Callable[[np.ndarray], Any]) -> None:
    """Numbers whose sums are exact in float32 and not in 16 bits: one rounding is all there is."""
    generator = np.random.default_rng(0)
    everyones = generator.integers(-(2**7), 2**7, (P, 999)).astype(np.float32)
    everyones += generator.integers(0, 2, (P, 999))
    everyones[:, ::3] *= 8
    exact = half(everyones.sum(0))
    for ranks_per_node in sorted(set(LAYOUTS)):
        for algorithm in ALGORITHMS:
            options = {"algorithm": algorithm, "nodes": ranks_per_node, "chunk": CHUNK}
            got = mpi.allreduce(half(everyones[world.rank]), **options)
            assert got.dtype == exact.dtype
            assert (got == exact).all()


def halves_are_rounded_once_for_both_levels() -> None:
    rounded_once_for_both_levels(lambda x: x.astype(np.float16))


def one_node_or_one_rank_on_each_is_flat() -> None:
    x = array(world.rank, 1000, "float32")
    want = mpi.allreduce(x, algorithm="direct")
    for ranks_per_node in (1, P, P + 1):
        got = mpi.allreduce(x, algorithm="direct", nodes=ranks_per_node)
        assert got.tobytes() == want.tobytes()
        assert nodes.nodes_of(mpi.Communicator.of(world), ranks_per_node).is_flat


def mpi_is_asked_for_the_nodes() -> None:
    shared = world.Split_type(MPI.COMM_TYPE_SHARED)
    mine = tuple(shared.allgather(world.rank))
    shared.Free()
    found = nodes.nodes_of(mpi.Communicator.of(world))
    assert mine in found.members
    assert sorted(rank for members in found.members for rank in members) == list(range(P))
    x = array(world.rank, 100, "int64")
    np.testing.assert_array_equal(mpi.allreduce(x, nodes=True), np.sum(arrays(100, "int64"), 0))


def each_rank_sends_what_the_formula_says() -> None:
    comm = mpi.Communicator(world, checks=0)
    for inside in range(2, P):
        if P % inside:
            continue
        across, n = P // inside, 4 * P
        for algorithm in ("direct", "ring"):
            x = np.ones(n, np.float32)
            mpi.allreduce(x, comm=comm, algorithm=algorithm, nodes=inside)
            before = comm.bytes_sent
            mpi.allreduce(x, comm=comm, algorithm=algorithm, nodes=inside)
            within = 2 * 4 * n * (inside - 1) // inside
            between = 2 * 4 * (n // inside) * (across - 1) // across
            assert comm.bytes_sent - before == within + between
    comm.free()


def places_that_a_node_shares_cross_once() -> None:
    """Ranks that all choose the same k places: k go across, and not L k."""
    n, k = 10_000, 64
    comm = mpi.Communicator(world, checks=0)
    same = Sparse(np.arange(k) * (n // k), np.ones(k, np.float32))
    for inside in range(2, P):
        if P % inside:
            continue
        options = {"comm": comm, "algorithm": "allgather", "nodes": inside}
        mpi.sparse_allreduce(same, n, **options)
        opened: list[Channel] = []

        def noted(self: Channel, *args: Any, opened: list[Channel] = opened) -> Channel:
            opened.append(WITHIN(self, *args))
            return opened[-1]

        with mock.patch.object(Channel, "within", noted):
            mpi.sparse_allreduce(same, n, **options)
        across = [channel for channel in opened if channel.place == f"{nodes.ACROSS}, "]
        size, sent = P // inside, world.allreduce(sum(channel.bytes_sent for channel in across))
        headers = 8 + 16 + 8  # a size, a header, padding
        assert 0 < sent <= P * (size - 1) * headers + 8 * k * size * (size - 1)
    comm.free()


def messages_name_ranks_of_the_whole() -> None:
    comm = mpi.Communicator(world)
    found = nodes.nodes_of(comm, 2)
    assert nodes.nodes_of(comm, 2) is found
    whole = comm.channel()
    if found.across is not None:
        across, before = whole.within(found.across, "a test"), comm.bytes_sent
        left, right = (across.rank - 1) % across.size, (across.rank + 1) % across.size
        buffers = {left: np.empty(3, np.uint8)}, {right: np.zeros(3, np.uint8)}
        wait = across.exchange(*buffers, "a test")
        assert [m[0] for m in wait.messages] == [found.across[left], found.across[right]]
        for request in wait.requests:
            request.Wait()
        assert found.across[across.rank] == world.rank
        assert whole.bytes_sent == comm.bytes_sent - before == 3  # counted on the whole
    comm.free()


def refusals_name_the_way_out() -> None:
    """dense.py has those of what is added up."""
    x, sparse = np.ones(3), Sparse(np.arange(1), np.ones(1))
    for ranks_per_node in (0, -1, 1.5, "all", None):
        with raises(ConfigError, "nodes=", "1 or more"):
            mpi.allreduce(x, nodes=ranks_per_node)
    with raises(ConfigError, "algorithm"):
        mpi.sparse_allreduce(sparse, 9, algorithm="ring", nodes=True)
    if P > 1:
        comm = mpi.Communicator(world, timeout=20, checks=0)
        with raises(MismatchError, "nodes=2", "nodes=3"):
            mpi.allreduce(x, comm=comm, nodes=3 if world.rank else 2)
        comm.free()
