"""Dense allreduce: every algorithm, dtype and size, against sums that NumPy makes."""

from __future__ import annotations

import numpy as np

from hvd_compress import mpi
from hvd_compress.errors import ConfigError, UnsupportedError
from tests.mpi_scenarios.common import (
    FLOATS,
    INTEGERS,
    array,
    arrays,
    assert_same_everywhere,
    dense_algorithms,
    raises,
    world,
)

SIZES = (0, 1, 2, world.size, world.size + 1, 1000, 10007)
if world.size > 4:  # more ranks than cores take their time
    SIZES = (0, 1, world.size + 1, 2003)
CHUNK = 1024  # bytes: several blocks, the last one not full


def _sizes(dtype: str) -> tuple[int, ...]:
    """All of them in one type of integers and one of floats: blocks are cut by their bytes."""
    return SIZES if dtype in ("int32", "float32") else (1, SIZES[-1])


def integers_are_exact() -> None:
    for _, allreduce in dense_algorithms():
        for dtype in INTEGERS:
            for n in _sizes(dtype):
                mine, everyones = array(world.rank, n, dtype), arrays(n, dtype)
                total = allreduce(mine, chunk=CHUNK)
                assert total.dtype == dtype
                np.testing.assert_array_equal(total, np.sum(everyones, 0, dtype))
                np.testing.assert_array_equal(
                    allreduce(mine, op="max", chunk=CHUNK), np.max(everyones, 0)
                )
                np.testing.assert_array_equal(mine, everyones[world.rank])  # untouched


def floats_are_near_the_exact_sum() -> None:
    for _, allreduce in dense_algorithms():
        for dtype in FLOATS:
            for n in _sizes(dtype):
                everyones = arrays(n, dtype)
                exact = np.sum(everyones, 0, np.float64)
                magnitude = np.sum(np.abs(everyones), 0, np.float64)
                # Each addition in float32 or float64 rounds once, halves once more at the end.
                unit = np.finfo("float32" if dtype == "float16" else dtype).eps
                bound = world.size * unit * magnitude
                if dtype == "float16":
                    bound += 2.0**-11 * np.abs(exact) + 2.0**-25
                for op, scale in (("sum", 1), ("mean", world.size)):
                    got = allreduce(everyones[world.rank], op=op, chunk=CHUNK)
                    assert got.dtype == dtype
                    assert (np.abs(got.astype(np.float64) * scale - exact) <= bound * 1.01).all()
                    assert_same_everywhere(got)
                largest = allreduce(everyones[world.rank], op="max", chunk=CHUNK)
                np.testing.assert_array_equal(largest, np.max(everyones, 0))


def nan_has_the_same_bits_everywhere() -> None:
    """Each rank brings a NaN of its own, and partners see two of them."""
    for _, allreduce in dense_algorithms():
        for op in ("sum", "max"):
            x = np.full(SIZES[-1], 0x7FC00001 + world.rank, np.uint32).view(np.float32)
            got = allreduce(x, op=op, chunk=CHUNK)
            assert np.isnan(got).all()
            assert_same_everywhere(got)


def shapes_and_views() -> None:
    base = array(world.rank, 60, "float32")
    want = mpi.allreduce(base, algorithm="direct")
    read_only = np.broadcast_to(base[:10], (6, 10))
    for x, same in (
        (base.reshape(3, 4, 5), want.reshape(3, 4, 5)),
        (np.asfortranarray(base.reshape(6, 10)), want.reshape(6, 10)),
        (base[::2], want[::2]),
        (base[:0], want[:0]),
        (read_only, np.broadcast_to(want[:10], (6, 10))),
    ):
        np.testing.assert_array_equal(mpi.allreduce(x, algorithm="direct"), same)
    with raises(ConfigError, "read-only"):
        mpi.allreduce(base.reshape(6, 10), algorithm="direct", out=read_only)
    kept = base.copy()
    kept.flags.writeable = False
    with raises(ConfigError, "read-only"):
        mpi.allreduce(kept, algorithm="direct", out=kept)
    for _, allreduce in dense_algorithms():
        both = np.concatenate([base, base[:1]])
        total = allreduce(both[:-1].copy())
        allreduce(both[:-1], out=both[1:])  # they overlap
        np.testing.assert_array_equal(both[1:], total)
    view = base.reshape(6, 10).T  # not contiguous
    np.testing.assert_array_equal(mpi.allreduce(view, algorithm="direct"), want.reshape(6, 10).T)
    kept = base.copy().reshape(6, 10).T
    assert mpi.allreduce(kept, algorithm="direct", out=kept) is kept
    np.testing.assert_array_equal(kept, want.reshape(6, 10).T)
    scalar = mpi.allreduce(np.float64(world.rank), algorithm="direct")
    assert scalar.shape == ()
    assert scalar == sum(range(world.size))


def nan_and_inf_reach_every_rank() -> None:
    for _, allreduce in dense_algorithms():
        for dtype in FLOATS:
            x = np.ones(100, dtype)
            x[7] = np.nan if world.rank == world.size - 1 else world.rank
            x[50] = np.inf
            x[60 + world.rank] = np.nan  # on every rank elsewhere
            spoilt = [7, 50, *range(60, 60 + world.size)]
            for op in ("sum", "mean", "max"):
                got = allreduce(x, op=op, chunk=CHUNK)
                assert np.isnan(got[7])
                assert np.isposinf(got[50])
                assert np.isnan(got[spoilt[2:]]).all()
                assert np.isfinite(np.delete(got, spoilt)).all()
                assert_same_everywhere(got)


def each_rank_sends_what_the_formula_says() -> None:
    comm = mpi.Communicator(world, checks=0)
    p, n = world.size, 64 * world.size
    for name, allreduce in dense_algorithms():
        if "across nodes" in name:  # see hierarchical.py
            continue
        before = comm.bytes_sent
        allreduce(np.ones(n, np.float32), comm=comm)
        sent = comm.bytes_sent - before
        if name in ("ring", "direct") or (name.startswith("halving") and p & (p - 1) == 0):
            assert sent == 2 * 4 * n * (p - 1) // p, name
        else:
            everything = world.allreduce(sent)
            assert everything <= (2 * 4 * n * (p - 1) + 2 * 4 * n * p), name
        if name in ("ring", "halving_doubling"):
            before = comm.bytes_sent
            allreduce(np.ones(n, np.float16), comm=comm)
            if p & (p - 1) == 0 or name == "ring":  # partial sums travel as float32
                assert comm.bytes_sent - before == (4 + 2) * n * (p - 1) // p, name
    comm.free()


def auto_gives_the_sum_and_chooses_alike() -> None:
    for n in (1, 1000, 100000):
        x = arrays(n, "float32")
        got = mpi.allreduce(x[world.rank])
        np.testing.assert_allclose(got, np.sum(x, 0), rtol=1e-4, atol=1e-4)
        assert_same_everywhere(got)


def refusals_name_the_way_out() -> None:
    with raises(ConfigError, "algorithm must be one of", "ring.*tree"):
        mpi.allreduce(np.ones(3), algorithm="tree")
    with raises(ConfigError, "op='min'", "sum"):
        mpi.allreduce(np.ones(3), algorithm="ring", op="min")
    with raises(UnsupportedError, "mean of int32", "sum"):
        mpi.allreduce(np.ones(3, np.int32), algorithm="ring", op="mean")
    with raises(UnsupportedError, "complex128", "convert"):
        mpi.allreduce(np.ones(3, complex), algorithm="ring")
    with raises(UnsupportedError, "list", "NumPy"):
        mpi.allreduce([1.0, 2.0], algorithm="ring")
    with raises(UnsupportedError, "byte order"):
        mpi.allreduce(np.ones(3, ">f4"), algorithm="ring")
    with raises(ConfigError, "out is", "alike"):
        mpi.allreduce(np.ones(3), algorithm="ring", out=np.ones(4))
    with raises(ConfigError, "chunk"):
        mpi.allreduce(np.ones(3), algorithm="ring", chunk=1)
