"""Quantised allreduce: nothing is lost, nobody differs, and it is as small as it says."""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np

from hvd_compress import mpi
from hvd_compress.codecs import column_means, linear
from hvd_compress.codecs.frame import coded_size
from hvd_compress.errors import ConfigError, MismatchError, PayloadError, UnsupportedError
from hvd_compress.mpi.transport.communicator import Channel
from hvd_compress.sharding import shards_of
from tests.mpi_scenarios.common import array, assert_same_everywhere, raises, world
from tests.scenarios import applies

HEADER = 16
SHAPES = ((), (0,), (1,), (5000,), (13, 40), (4, 3, 5, 2))
P = world.size


def _array(rank: int, shape: tuple[int, ...], dtype: str, step: int) -> np.ndarray:
    return array(rank, int(np.prod(shape)), dtype, step).reshape(shape)


def _whole(state: mpi.QuantizedState, shape: tuple[int, ...]) -> np.ndarray:
    """What waits on all ranks, of the sum, in float64; known to rank 0."""
    waiting = np.zeros(shape)
    if state.worker is not None:
        everything = mpi.QuantizedState()
        everything.load_state_dict(state.state_dict())
        everything.fold()
        waiting += everything.worker
        # Folding is tested elsewhere; here the two must at least add up.
        both = state.worker.sum(dtype=float) + state.owner.sum(dtype=float)
        np.testing.assert_allclose(waiting.sum(), both, rtol=1e-3, atol=1e-3)
    return world.allreduce(waiting)


def nothing_is_lost() -> None:
    """What came in and what waited = what was delivered and what waits."""
    kinds = (("mean", "float16"), ("sum", "float32"))
    for bits, (op, dtype) in itertools.product((1, 8), kinds):
        for shape, columns in [(s, "first") for s in SHAPES] + [((13, 40), "last"), ((13, 40), 7)]:
            state = mpi.QuantizedState()
            for step in range(2):
                x = _array(world.rank, shape, dtype, step)
                before = world.allreduce(x.astype(float)) + _whole(state, shape)
                got = mpi.quantized_allreduce(x, state, bits=bits, op=op, columns=columns)
                assert (got.shape, got.dtype) == (x.shape, x.dtype)
                assert_same_everywhere(got)
                delivered = got.astype(float) * (P if op == "mean" else 1)
                np.testing.assert_allclose(
                    delivered + _whole(state, shape), before, rtol=0, atol=1e-5 * P
                )


def nothing_is_lost_in_float64() -> None:
    for bits, shape in itertools.product((1, 8), SHAPES):
        state = mpi.QuantizedState()
        for step in range(3):
            x = _array(world.rank, shape, "float64", step)
            before = world.allreduce(x) + _whole(state, shape)
            got = mpi.quantized_allreduce(x, state, bits=bits)
            assert got.dtype == state.worker.dtype == state.owner.dtype == np.float64
            after = got * P + _whole(state, shape)
            np.testing.assert_allclose(after, before, rtol=0, atol=1e-14 * P)


def two_quantisations_and_no_more() -> None:
    """Against a simulation of all ranks, column by column."""

    def one_bit(column: np.ndarray) -> np.ndarray:
        low, high = column[column < 0], column[column >= 0]
        means = [part.sum() / np.float32(max(part.size, 1)) for part in (low, high)]
        return np.where(column < 0, *means)

    def linear(column: np.ndarray) -> np.ndarray:
        scale = np.abs(column).max() / np.float32(127)
        return np.rint(column / scale).astype(np.float32) * scale

    shape = (2 * P + 1, 12)
    for bits, quantise in ((1, one_bit), (8, linear)):
        workers = np.zeros((P, *shape), np.float32)
        owner = np.zeros(shape, np.float32)
        state = mpi.QuantizedState()
        for step in range(3):
            sent = np.zeros_like(workers)
            for rank in range(P):
                workers[rank] += _array(rank, shape, "float32", step)
                sent[rank] = [quantise(column) for column in workers[rank]]
                owner += sent[rank]
            workers -= sent
            mean = np.array([quantise(column) for column in owner]) / np.float32(P)
            owner -= mean * P
            x = _array(world.rank, shape, "float32", step)
            got = mpi.quantized_allreduce(x, state, bits=bits)
            np.testing.assert_allclose(got, mean, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(state.worker, workers[world.rank], rtol=1e-4, atol=1e-4)
            mine = shards_of(shape[0], P)[world.rank]
            np.testing.assert_allclose(state.owner, owner[mine].ravel(), rtol=1e-4, atol=1e-4)


def what_waits_is_delivered_in_time() -> None:
    """The average of many results nears the average of what came in."""
    x = _array(world.rank, (6, 100), "float32", 0)
    mean = world.allreduce(x.astype(float)) / P
    for bits, share in ((1, 0.65), (8, 0.1)):
        state, total, errors = mpi.QuantizedState(), np.zeros(x.shape), []
        for step in range(32):
            total += mpi.quantized_allreduce(x, state, bits=bits)
            errors.append(np.abs(total / (step + 1) - mean).max())
        assert errors[-1] < share * errors[0]


def bytes_are_what_the_paper_counts() -> None:
    comm = mpi.Communicator(world, checks=0)
    rows, columns = 2048, 3 * P
    x = _array(world.rank, (columns, rows), "float32", 0)
    for bits, codec, column_bits in (
        (1, column_means(rows), 2048 + 64),
        (8, linear(8, rows), 8 * 2048 + 32),
    ):
        before = comm.bytes_sent
        mpi.quantized_allreduce(x, mpi.QuantizedState(), bits=bits, comm=comm)
        sent = comm.bytes_sent - before
        assert sent == 2 * (P - 1) * coded_size(codec, 3 * rows, x.dtype)
        padding = -3 * column_bits // 8 % 8
        sent -= 2 * (P - 1) * (HEADER + padding)
        assert sent == 2 * 3 * (P - 1) * column_bits // 8
        before = comm.bytes_sent
        mpi.direct_allreduce(x, comm=comm)
        if P > 1:
            ratio = (comm.bytes_sent - before) / sent
            assert round(ratio, 2) == {1: 31.03, 8: 3.99}[bits]
    comm.free()


def nan_and_inf_reach_every_rank_and_no_residual() -> None:
    for bits, dtype in itertools.product((1, 8), ("float16", "float32", "float64")):
        state = mpi.QuantizedState()
        for value in (np.nan, np.inf, -np.inf):
            mpi.quantized_allreduce(_array(world.rank, (P, 9), dtype, 0), state, bits=bits)
            kept = state.state_dict()
            x = _array(world.rank, (P, 9), dtype, 1)
            if world.rank == P - 1:
                x[0, 3] = value
            assert np.isnan(mpi.quantized_allreduce(x, state, bits=bits)).all()
            for name in ("worker", "owner"):
                np.testing.assert_array_equal(getattr(state, name), kept[name])
    # Both Inf and -Inf, on different ranks, and sums too large for half precision.
    state = mpi.QuantizedState()
    got = mpi.quantized_allreduce(np.full(5, np.inf if world.rank else -np.inf), state)
    assert np.isnan(got).all()
    large = np.full((P, 4), 60000, np.float16)
    got = mpi.quantized_allreduce(large, mpi.QuantizedState(), op="sum")
    assert np.isnan(got).all() if P > 1 else (got == 60000).all()


@applies(least=2)
def damage_is_an_error_everywhere_and_changes_nothing() -> None:
    comm = mpi.Communicator(world, checks=0)
    state = mpi.QuantizedState()
    x = _array(world.rank, (2 * P, 9), "float32", 0)
    mpi.quantized_allreduce(x, state, comm=comm)
    kept = state.state_dict()
    send, damaged = Channel.send, []

    def damaging(self, frame, to):
        if world.rank == P - 1 and to == 0 and not damaged:
            frame = frame.copy()
            frame[-1] ^= 1
            damaged.append(frame)
        return send(self, frame, to)

    with mock.patch.object(Channel, "send", damaging):
        words = [f"rank {P - 1}", "checksum"] if world.rank == 0 else ["rank 0 got a damaged"]
        with raises(PayloadError, *words):
            mpi.quantized_allreduce(x, state, comm=comm)
    for name in ("worker", "owner"):
        np.testing.assert_array_equal(getattr(state, name), kept[name])
    assert_same_everywhere(mpi.quantized_allreduce(x, state, comm=comm))
    comm.free()


def states_are_saved_and_restored() -> None:
    state, again = mpi.QuantizedState(), mpi.QuantizedState()
    for step in range(2):
        mpi.quantized_allreduce(_array(world.rank, (7, 9), "float32", step), state)
    again.load_state_dict(state.state_dict())
    x = _array(world.rank, (7, 9), "float32", 2)
    one, other = (mpi.quantized_allreduce(x, each) for each in (state, again))
    assert one.tobytes() == other.tobytes()
    for name in ("worker", "owner"):
        np.testing.assert_array_equal(getattr(state, name), getattr(again, name))
    with raises(ConfigError, "worker", "owner"):
        again.load_state_dict({"worker": None})


def ranks_may_change() -> None:
    """Half of the ranks go on, with what all left behind."""
    half = world.Split(world.rank % 2)
    for columns in ("first", "last"):
        state = mpi.QuantizedState()
        for step in range(2):
            x = _array(world.rank, (7, 9), "float32", step)
            mpi.quantized_allreduce(x, state, columns=columns)
        waiting = _whole(state, (7, 9))
        if P > 1:
            with raises(ConfigError, f"rank {world.rank} of {P}", "consolidate"):
                mpi.quantized_allreduce(x, state, columns=columns, comm=half)

        folded = mpi.QuantizedState()
        folded.load_state_dict(state.state_dict())
        folded.fold()
        assert folded.owner is None
        np.testing.assert_allclose(world.allreduce(folded.worker), waiting, atol=1e-4)
        mpi.quantized_allreduce(x, folded, columns=columns, comm=half)

        mpi.consolidate(state)
        assert_same_everywhere(state.worker)
        np.testing.assert_allclose(state.worker * P, waiting, atol=1e-5 * P)
        saved = world.bcast(state.state_dict())  # as a checkpoint that rank 0 writes
        state = mpi.QuantizedState()
        state.load_state_dict(saved)
        mean = half.allreduce(x.astype(float)) / half.size + waiting / P
        got = mpi.quantized_allreduce(x, state, columns="first", comm=half)
        after = mpi.QuantizedState()
        after.load_state_dict(state.state_dict())
        after.fold()
        np.testing.assert_allclose(
            got + half.allreduce(after.worker) / half.size, mean, atol=1e-5 * P
        )
    half.Free()
    mpi.consolidate(mpi.QuantizedState())  # nothing was exchanged, nothing waits


def views_are_read_right() -> None:
    base = _array(world.rank, (6, 10), "float32", 0)
    for x in (base.T, base[::2], np.asfortranarray(base)):
        one = mpi.quantized_allreduce(x, mpi.QuantizedState())
        other = mpi.quantized_allreduce(x.copy(), mpi.QuantizedState())
        np.testing.assert_array_equal(one, other)
        turned = mpi.quantized_allreduce(x.T, mpi.QuantizedState(), columns="last")
        np.testing.assert_array_equal(turned, one.T)


def refusals_name_the_way_out() -> None:
    x = np.ones((3, 4), np.float32)
    with raises(ConfigError, "bits=2", "1, 8"):
        mpi.quantized_allreduce(x, mpi.QuantizedState(), bits=2)
    with raises(ConfigError, "op='max'", "mean"):
        mpi.quantized_allreduce(x, mpi.QuantizedState(), op="max")
    for columns in ("rows", 0, -1, 1.5, True):
        with raises(ConfigError, "columns=", "first"):
            mpi.quantized_allreduce(x, mpi.QuantizedState(), columns=columns)
    with raises(UnsupportedError, "int32", "allreduce"):
        mpi.quantized_allreduce(x.astype(np.int32), mpi.QuantizedState())
    state = mpi.QuantizedState()
    mpi.quantized_allreduce(x, state)
    for other in (x.T, x.astype(np.float64)):
        with raises(ConfigError, "state is for", "each array"):
            mpi.quantized_allreduce(other, state)
    with raises(ConfigError, "columns='first'", "columns=4"):
        mpi.quantized_allreduce(x, state, columns=4)
    if P > 1:
        comm = mpi.Communicator(world, timeout=20)
        with raises(MismatchError, "bits=1", "bits=8"):
            bits = 8 if world.rank else 1
            mpi.quantized_allreduce(x, mpi.QuantizedState(), bits=bits, comm=comm)
        comm.free()
