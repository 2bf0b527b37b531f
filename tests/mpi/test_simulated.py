"""Collectives at every number of ranks from 1 to 33, in every order of messages, in this process.

The results are compared with sums that NumPy makes, and between ranks bit by bit; that no message
is left over or taken for another, and that nobody waits for ever, is what the simulation checks.
"""

from __future__ import annotations

import functools
import importlib
import sys
import warnings

import numpy as np
import pytest
from hypothesis import assume, given, seed, settings
from hypothesis import strategies as st

from hvd_compress import PoorFit, Sparse, as_compressor, mpi
from hvd_compress.backends import numpy as numpy_backend
from hvd_compress.engines.lockstep import World
from hvd_compress.errors import CollectiveTimeout, MismatchError, PayloadError
from hvd_compress.mpi.collectives.dense import ALGORITHMS
from hvd_compress.mpi.collectives.payloads import alltoall, broadcast, gather
from hvd_compress.mpi.collectives.sparse import ALGORITHMS as SPARSE
from hvd_compress.mpi.engine import MpiEngine
from hvd_compress.mpi.transport import channel
from hvd_compress.requests import Max, SparseSum, Sum
from hvd_compress.requests.algorithms import DENSE as TAGGED
from tests.mpi_scenarios import MODULES
from tests.scenarios import names
from tests.simulated_mpi import ORDERS, Simulation, SimulationError

#: all from 1 to 33, but with --full only where the cost is high and neighbours say as much
SIZES = [
    size if size <= 9 or size in (12, 16, 17, 33) else pytest.param(size, marks=pytest.mark.full)
    for size in range(1, 34)
]
#: for whole methods, which take long on many ranks; what they send by is tested at 33, too
SIZES_OF_METHODS = [
    size if size in (1, 2, 3, 4, 5, 8) else pytest.param(size, marks=pytest.mark.full)
    for size in range(1, 34)
]
orders = st.tuples(st.sampled_from(ORDERS), st.integers(0, 2**16))
lengths = st.one_of(st.integers(0, 70), st.integers(200, 400))


def at_every_size(examples, cases=(None,), *, sizes=SIZES, **strategies):
    """Run a test at each number of ranks, with ``examples`` of its own drawn for each.

    The test is given ``size``, its ``case`` if there are ``cases``, and what is drawn.
    """

    def decorate(test):
        @pytest.mark.parametrize("size", sizes)
        @pytest.mark.parametrize("case", cases)
        def at_one_size(size, case):
            @seed(size)
            @settings(max_examples=examples)
            @given(**strategies)
            def with_examples(**drawn):
                test(size, *([] if case is None else [case]), **drawn)

            with_examples()

        at_one_size.__name__, at_one_size.__doc__ = test.__name__, test.__doc__
        return at_one_size

    return decorate


def assert_same(results):
    """All ranks hold the same bits."""
    assert len({tuple(map(bits, result)) for result in results}) == 1, "ranks hold different bits"


def bits(array):
    return array.dtype.str, array.shape, np.ascontiguousarray(array).tobytes()


def numbers(rank, n, dtype="float32", seed=0):
    """Whole numbers whose sums are exact in every dtype."""
    return np.random.default_rng([seed, rank, n]).integers(-3, 4, n).astype(dtype)


def entries(rank, n, k, dtype="float32", seed=0):
    generator = np.random.default_rng([seed, rank, n, k])
    indices = np.sort(generator.choice(n, min(k, n), replace=False))
    values = generator.integers(1, 9, indices.size) * generator.choice([-1, 1], indices.size)
    return Sparse(indices, values.astype(dtype))


def dense(vector, n, dtype="float64"):
    x = np.zeros(n, dtype)
    x[vector.indices] = vector.values
    return x


# -- dense -----------------------------------------------------------------------------------------

DENSE = {name: functools.partial(mpi.allreduce, algorithm=name) for name in TAGGED}
DENSE["hierarchical"] = functools.partial(mpi.allreduce, nodes=True)


@at_every_size(
    2,
    DENSE,
    order=orders,
    n=lengths,
    dtype=st.sampled_from(["float32", "float64", "float16", "int16"]),
    op=st.sampled_from(["sum", "mean", "max"]),
    chunk=st.sampled_from([64, 256, 4096]),
    segment=st.sampled_from([0, 24]),
    in_place=st.booleans(),
    across=st.sampled_from([*ALGORITHMS]),
    ranks_per_node=st.integers(1, 7),
)
def test_dense_sums(
    size, name, order, n, dtype, op, chunk, segment, in_place, across, ranks_per_node
):
    assume(op != "mean" or dtype != "int16")
    options = {"op": op, "chunk": chunk}
    if name == "hierarchical":
        options |= {"algorithm": across, "nodes": ranks_per_node}
    brought = [numbers(rank, n, dtype) for rank in range(size)]

    def rank():
        comm = mpi.Communicator(segment=segment)
        x = brought[comm.rank].copy()
        got = DENSE[name](x, comm=comm, out=x if in_place else None, **options)
        assert (got is x) == in_place
        if not in_place:
            np.testing.assert_array_equal(x, brought[comm.rank])
        return (got,)

    results = Simulation(size, *order).run(rank)
    want = np.max(brought, 0) if op == "max" else np.sum(brought, 0, np.float64)
    if op == "mean":
        # Halves are divided in float32, and rounded once.
        wide = np.float32 if dtype == "float16" else dtype
        want = want.astype(wide) / np.asarray(size, wide)
    np.testing.assert_array_equal(results[0][0], want.astype(dtype))
    assert_same(results)


@at_every_size(2, order=orders, n=lengths, dtype=st.sampled_from(["float32", "float64"]))
def test_the_order_of_additions(size, order, n, dtype):
    """Direct sums are those of a loop over the ranks; all others have the same bits everywhere."""
    brought = [np.random.default_rng(rank).standard_normal(n).astype(dtype) for rank in range(size)]

    def rank():
        comm = mpi.Communicator()
        mine = brought[comm.rank]
        return [
            allreduce(mine, comm=comm, **({"algorithm": "ring"} if name == "hierarchical" else {}))
            for name, allreduce in DENSE.items()
        ]

    results = Simulation(size, *order, ranks_per_machine=3).run(rank)
    total = brought[0].copy()
    for x in brought[1:]:
        total += x
    assert bits(results[0][0]) == bits(total)
    for got in results[0]:
        np.testing.assert_allclose(got, total, atol=1e-5 * size)
    assert_same(results)


@at_every_size(3, order=orders, n=st.integers(0, 40))
def test_bytes_of_all_ranks(size, order, n):
    def rank():
        comm = mpi.Communicator(checks=0)
        me = comm.rank
        mine = np.full(n + me % 3, me, np.uint8)
        gathered = comm.run("allgather", gather(comm.channel(), mine))[0]
        outgoing = [np.full((n + 7 * to) % 11, (7 * me + to) % 251, np.uint8) for to in range(size)]
        exchanged = comm.run("all-to-all", alltoall(comm.channel(), outgoing, equal_sizes=True))[0]
        for sender, theirs in enumerate(exchanged):
            np.testing.assert_array_equal(
                theirs, np.full((n + 7 * me) % 11, (7 * sender + me) % 251, np.uint8)
            )
        return gathered

    results = Simulation(size, *order).run(rank)
    for sender, theirs in enumerate(results[0]):
        np.testing.assert_array_equal(theirs, np.full(n + sender % 3, sender, np.uint8))
    assert_same(results)


# -- sparse ----------------------------------------------------------------------------------------


@at_every_size(2, order=orders, n=st.integers(0, 40), hops=st.sets(st.integers(1, 40)))
def test_neighbours(size, order, n, hops):
    """In a directed graph, where a rank sends to its neighbours and to nobody else."""
    hops = sorted({hop % size for hop in hops} - {0})

    def rank():
        comm = mpi.Communicator(checks=0)
        me = comm.rank
        targets, sources = [(me + h) % size for h in hops], [(me - h) % size for h in hops]
        before = comm.bytes_sent
        mine = np.full(n, me, np.uint8)
        ends = dict.fromkeys(targets, mine), sources, "neighbours"
        equal = channel.exchange(comm.channel(), *ends, like=mine)
        received = comm.run("neighbours", equal)[0]
        assert comm.bytes_sent - before == n * len(hops)
        assert list(received) == sources
        for source, theirs in received.items():
            np.testing.assert_array_equal(theirs, np.full(n, source, np.uint8))
        other = np.full(me % 3, me, np.uint8)
        ends = dict.fromkeys(targets, other), sources, "neighbours"
        received = comm.run("neighbours", channel.exchange(comm.channel(), *ends))[0]
        assert comm.bytes_sent - before == (n + me % 3 + 8) * len(hops)
        for source, theirs in received.items():
            np.testing.assert_array_equal(theirs, np.full(source % 3, source, np.uint8))

    Simulation(size, *order).run(rank)


@at_every_size(2, order=orders, n=st.sampled_from([0, 1, 17, 16 * 1024, 16 * 1024 + 1, 40_000]))
def test_broadcasts_from_each_root(size, order, n):
    """No rank sends of long arrays more than twice the bytes."""

    def rank():
        comm = mpi.Communicator(checks=0)
        for root in {0, size // 2, size - 1}:
            sent = np.random.default_rng(root).integers(0, 256, n, np.uint8)
            array = sent.copy() if comm.rank == root else np.zeros(n, np.uint8)
            before = comm.bytes_sent
            comm.run("broadcast", broadcast(comm.channel(), array, root))
            np.testing.assert_array_equal(array, sent)
            assert n <= 16 * 1024 or comm.bytes_sent - before <= 2 * n

    Simulation(size, *order).run(rank)


def assert_nothing_is_lost(brought, results, n, scale=1):
    """The sum of the ranks' vectors = the sum + what they dropped."""
    left = sum(dense(result.dropped, n) for result in results)
    got = results[0].dense(n).astype(np.float64) * scale + left
    exact = sum(dense(x, n) for x in brought)
    np.testing.assert_allclose(got, exact, rtol=1e-6, atol=1e-6 * len(brought))
    totals = [result.total for result in results]
    assert_same([t if isinstance(t, Sparse) else [t] for t in totals])


@at_every_size(
    3,
    [*SPARSE, "hierarchical"],
    order=orders,
    n=st.integers(1, 300),
    k=st.integers(0, 60),
    op=st.sampled_from(["sum", "mean"]),
    indices=st.sampled_from(["int32", "packed"]),
    values=st.sampled_from([None, "float16"]),
    ranks_per_node=st.integers(1, 7),
)
def test_sparse_sums(size, algorithm, order, n, k, op, indices, values, ranks_per_node):
    brought = [entries(rank, n, k * (rank % 3)) for rank in range(size)]

    def rank():
        comm = mpi.Communicator()
        options = {"op": op, "indices": indices, "comm": comm}
        options |= {"algorithm": algorithm, "values": values}
        if algorithm == "hierarchical":
            options |= {"algorithm": "split_allgather", "nodes": ranks_per_node}
        return mpi.sparse_allreduce(brought[comm.rank], n, **options)

    results = Simulation(size, *order).run(rank)
    assert_nothing_is_lost(brought, results, n, size if op == "mean" else 1)


@at_every_size(
    2,
    [
        "none",
        "bf16",
        "dgc:density=0.1",
        "oktopk:density=0.1,threshold_every=2",
        "oktopk:density=0.1,threshold_every=2,values=float16",
    ],
    sizes=SIZES_OF_METHODS,
    order=orders,
    bucket_bytes=st.sampled_from([1, 300, 10**9]),
)
def test_gradients_of_all_ranks(size, method, order, bucket_bytes):
    """The engine gives the bits of the lockstep world, in whatever order gradients are ready."""
    shapes = {"w1": (12, 10), "b1": (10,), "w2": (7,), "none": (0,)}

    def gradient(rank, step, name):
        seed = [rank, step, len(name), sum(shapes[name])]
        return np.random.default_rng(seed).standard_normal(shapes[name]).astype(np.float32)

    def rank():
        reducer = mpi.Reducer(method, bucket_bytes=bucket_bytes)
        me, directions = reducer.engine.rank, []
        for step in range(3):
            turn = (step + me) % len(shapes)
            ready = [*shapes][turn:] + [*shapes][:turn]
            for name in ready:
                reducer.start(name, gradient(me, step, name))
            done = reducer.finish()
            directions += [done[name] for name in shapes]
        return directions

    results = Simulation(size, *order).run(rank)
    assert_same(results)
    got = iter(results[0])
    worlds = {name: World(as_compressor(method), size) for name in shapes}
    for step in range(3):
        for name in shapes:
            everyones = [gradient(rank, step, name) for rank in range(size)]
            want = worlds[name].exchange(everyones, name)[0].direction
            assert bits(next(got)) == bits(numpy_backend.to_numpy(want))


@at_every_size(
    2,
    ["none:algorithm=hierarchical", "topk:density=0.1,algorithm=hierarchical"],
    sizes=SIZES_OF_METHODS,
    order=orders,
    ranks_per_machine=st.integers(1, 7),
)
def test_gradients_by_way_of_machines(size, method, order, ranks_per_machine):
    """The machines are those that MPI names; sums inside each come first."""
    gradients = [np.random.default_rng(rank).standard_normal((12, 10)) for rank in range(size)]

    def rank():
        reducer = mpi.Reducer(method)
        mine = gradients[reducer.engine.rank]
        return [reducer.reduce({"w": mine})["w"] for _ in range(2)]

    results = Simulation(size, *order, ranks_per_machine=ranks_per_machine).run(rank)
    assert_same(results)
    world = World(as_compressor(method), size)
    for got in results[0]:
        np.testing.assert_allclose(got, world.exchange(gradients, "w")[0].direction, atol=1e-12)


# -- every scenario --------------------------------------------------------------------------------

#: patch what all threads of a process share, or need its garbage collector or MPI's numbers
OF_PROCESSES = {
    "agreement.a_dropped_one_is_in_use_until_all_have_dropped_it",
    "agreement.notes_end_with_their_communicator",
    "agreement.what_all_have_dropped_is_freed",
    "algorithms.by_way_of_nodes",
    "hierarchical.places_that_a_node_shares_cross_once",
    "sparse.damage_is_noticed_by_all_who_read_it",
}
SCENARIOS = [
    name
    for module in MODULES
    for name in names(module, "mpi_scenarios", over="mpi")
    if name not in OF_PROCESSES
]
WORLDS = [
    (1, "first"),
    (4, "last"),
    (5, "random"),
    *(
        pytest.param(*world, marks=pytest.mark.full)
        for world in [(4, "slow"), (7, "random"), (8, "slow"), (13, "random"), (16, "last")]
    ),
]


def module_of_this_rank(name):
    """A copy of its own: scenarios keep their rank in variables of the module."""
    before = {copy: sys.modules.pop(copy) for copy in scenario_modules()}
    try:
        return importlib.import_module(f"tests.mpi_scenarios.{name}")
    finally:
        for copy in scenario_modules():
            del sys.modules[copy]
        sys.modules.update(before)


def scenario_modules():
    return [name for name in sys.modules if name.startswith("tests.mpi_scenarios.")]


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize(("size", "order"), WORLDS)
def test_scenario(size, order, name):
    module, function = name.split(".")
    if not names(name, "mpi_scenarios", over="mpi", ranks=size):
        pytest.skip(f"does not apply to {size} ranks")
    simulation = Simulation(size, order)

    def rank():
        getattr(module_of_this_rank(module), function)()
        simulation.world.Barrier()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=PoorFit)  # a few steps teach nothing
        simulation.run(rank)


# -- the simulation notices ------------------------------------------------------------------------


def exchange(comm, *, sends, receives, touch=False, read=None):
    channel = comm.channel()
    array = np.full(5, comm.rank, np.uint8)
    into = np.full(5, 99, np.uint8)
    wait = channel.exchange(dict.fromkeys(receives, into), dict.fromkeys(sends, array), "a test")
    if touch:
        array[0] += 1
    if read is not None:
        read.append(into.copy())
    yield wait
    return into


def run(function, size=2):
    return Simulation(size).run(lambda: function(mpi.Communicator(timeout=5, checks=0)))


def test_a_rank_that_waits_for_ever_is_named():
    def everyone_receives(comm):
        comm.run("a test", exchange(comm, sends=[], receives=[1 - comm.rank]))

    with pytest.raises(CollectiveTimeout, match=r"rank \d of 2 .* waits for a message from rank"):
        run(everyone_receives)


def test_a_message_that_cannot_be_read_breaks_the_communicator():
    """Others may go on with it, so that later messages could be mistaken."""

    def rank():
        engine = MpiEngine(mpi.Communicator(checks=0))

        def differs():
            entries = Sparse(np.array([0, 1 + 6 * engine.rank]), np.ones(2, np.float32))
            yield SparseSum(entries, 4 + 8 * engine.rank, None, "allgather")

        def sums():
            return (yield Sum(np.ones(2)))

        engine.start("a", differs())
        with pytest.raises(PayloadError):
            engine.finish()
        with pytest.raises(CollectiveTimeout, match=r"is broken: .*PayloadError"):
            engine.start("b", sums())

    Simulation(2).run(rank)


@pytest.mark.parametrize("algorithm", ["hierarchical", "auto"])
@pytest.mark.parametrize("order", [("last", 0), *(("random", number) for number in range(6))])
def test_exchanges_may_come_to_their_first_choice_in_any_order(algorithm, order):
    """The choice is a collective, and other exchanges move on while a rank waits for the others."""

    def rank():
        engine = MpiEngine(mpi.Communicator())

        def two_rounds(n):
            yield Max(np.ones(1, "f4"))
            return (yield Sum(np.ones(n, "f4"), algorithm=algorithm))

        for n in range(1, 4):
            engine.start(str(n), two_rounds(n))
        return [total.sum() for total in engine.finish().values()]

    assert Simulation(3, *order).run(rank) == [[3, 6, 9]] * 3


@pytest.mark.parametrize(("size", "absent"), [(4, 2), (5, 2), (5, 3)])
def test_time_outs_by_way_of_nodes_say_what_goes_across_them(size, absent):
    """Also on uneven nodes, and on ranks that send nothing across."""

    def rank():
        comm = mpi.Communicator(timeout=5, checks=0)
        options = {"algorithm": "ring", "comm": comm, "nodes": 2}
        mpi.allreduce(np.ones(9), **options)
        if comm.rank == absent:
            return ""
        with pytest.raises(CollectiveTimeout) as caught:
            mpi.allreduce(np.ones(9), **options)
        return str(caught.value)

    messages = Simulation(size).run(rank, may_leave=True)
    want = "allreduce(float64[9], sum, ring across nodes of 2)"
    assert [want in message for message in messages] == [rank != absent for rank in range(size)]
    assert size > 4 or "across nodes, ring" in messages[0]


def test_a_message_that_nobody_receives_is_an_error():
    def one_sends(comm):
        if comm.rank == 0:
            exchange(comm, sends=[1], receives=[]).send(None)

    with pytest.raises(SimulationError, match="no counterpart: from rank 0 to rank 1"):
        run(one_sends)


def test_an_array_that_changes_while_it_is_sent_is_an_error():
    def touches(comm):
        comm.run("a test", exchange(comm, sends=[1 - comm.rank], receives=[1 - comm.rank], touch=1))

    with pytest.raises(SimulationError, match="changed while it was being sent"):
        run(touches)


def test_what_is_read_too_soon_is_not_what_was_there():
    read = []

    def reads(comm):
        peers = {"sends": [1 - comm.rank], "receives": [1 - comm.rank]}
        return comm.run("a test", exchange(comm, **peers, read=read))[0]

    assert [into.tolist() for into in run(reads)] == [[1] * 5, [0] * 5]
    assert not any((into == 99).any() or (into < 2).any() for into in read)


def test_a_message_for_another_algorithm_is_an_error():
    """Two ranks that use the tags in turn, and one that has been round."""

    def out_of_step(comm):
        comm.tags = 2
        if comm.rank == 0:
            comm.channel()
        comm.run("a test", exchange(comm, sends=[1 - comm.rank], receives=[1 - comm.rank]))

    with pytest.raises(SimulationError, match="sent by one algorithm and received by another"):
        run(out_of_step)


def test_other_sizes_are_an_error():
    """On a communicator whose tags are too few to tell sizes apart."""

    def longer(comm):
        x = np.ones(9 + comm.rank, np.float32)
        mpi.allreduce(x, algorithm="direct", comm=comm)

    simulation = Simulation(2, largest_tag=2**15)
    with pytest.raises(MismatchError, match=r"bytes where|more than was expected"):
        simulation.run(lambda: longer(mpi.Communicator(checks=0)))


def test_an_error_of_one_rank_ends_the_others():
    def fails(comm):
        if comm.rank == 2:
            raise ZeroDivisionError
        mpi.allreduce(np.ones(9), algorithm="ring", comm=comm)

    with pytest.raises(ZeroDivisionError) as caught:
        run(fails, size=4)
    if sys.version_info >= (3, 11):  # which has notes
        assert caught.value.__notes__ == ["on rank 2 of 4, order 'first'"]


@pytest.mark.parametrize("order", ORDERS)
def test_orders_differ_and_come_again(order):
    def trace(seed):
        arrived = []

        def rank():
            comm = mpi.Communicator(checks=0)
            for step in range(5):
                mpi.allreduce(np.ones(40), algorithm="ring", comm=comm, chunk=64)
                arrived.append((comm.rank, step))

        Simulation(5, order, seed).run(rank)
        return arrived

    assert trace(1) == trace(1)
    assert (trace(1) == trace(2)) == (order in ("first", "last"))
