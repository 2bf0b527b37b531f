"""Dense allreduce: every algorithm, dtype and size, against sums that NumPy makes."""

from __future__ import annotations

import functools
from typing import Any

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
    refused,
    world,
)

SIZES = (0, 1, 2, world.size, world.size + 1, 1000, 10007)
if world.size > 4:  # more ranks than cores take their time
    SIZES = (0, 1, world.size + 1, 2003)
CHUNK = 1024  # bytes: several blocks, the last one not full


def _sizes(dtype: str) -> tuple[int, ...]:
    """All of them in one type of integers and one of floats: blocks are cut by their bytes."""
    return SIZES if dtype in ("int32", "float32") else (1, SIZES[-1])


def _rounding(everyones: list[np.ndarray]) -> Any:
    """How far from the exact sum a result may be."""
    dtype = everyones[0].dtype.name
    if dtype in INTEGERS:
        return 0
    magnitude = np.sum(np.abs(everyones), 0, np.float64)
    # Each addition in float32 or float64 rounds once, halves once more at the end.
    unit = np.finfo("float32" if dtype == "float16" else dtype).eps
    halves = 2.0**-11 * np.abs(np.sum(everyones, 0, np.float64)) + 2.0**-25
    return 1.01 * (world.size * unit * magnitude + (halves if dtype == "float16" else 0))


def results_are_near_those_of_numpy() -> None:
    for _, allreduce in dense_algorithms():
        for dtype in (*INTEGERS, *FLOATS):
            for n in _sizes(dtype):
                everyones = arrays(n, dtype)
                mine = everyones[world.rank].copy()
                exact, bound = np.sum(everyones, 0, np.float64), _rounding(everyones)
                for op, scale in (("sum", 1), ("mean", world.size)):
                    if op == "mean" and dtype in INTEGERS:
                        continue
                    got = allreduce(mine, op=op, chunk=CHUNK)
                    assert got.dtype == dtype
                    assert (np.abs(got.astype(np.float64) * scale - exact) <= bound).all()
                    assert_same_everywhere(got)
                largest = allreduce(mine, op="max", chunk=CHUNK)
                np.testing.assert_array_equal(largest, np.max(everyones, 0))
                np.testing.assert_array_equal(mine, everyones[world.rank])  # untouched


def nan_has_the_same_bits_everywhere() -> None:
    """Each rank brings a NaN of its own, and partners see two of them."""
    for _, allreduce in dense_algorithms():
        for op in ("sum", "max"):
            x = np.full(SIZES[-1], 0x7FC00001 + world.rank, np.uint32).view(np.float32)
            got = allreduce(x, op=op, chunk=CHUNK)
            assert np.isnan(got).all()
            assert_same_everywhere(got)


def scalars_and_what_overlaps_or_is_read_only() -> None:
    """tests/mpi has other layouts, and other places for results."""
    base = array(world.rank, 60, "float32")
    want = mpi.allreduce(base, algorithm="direct")
    read_only = np.broadcast_to(base[:10], (6, 10))
    same = np.broadcast_to(want[:10], (6, 10))
    np.testing.assert_array_equal(mpi.allreduce(read_only, algorithm="direct"), same)
    kept = base.copy()
    kept.flags.writeable = False
    for x, out in ((base.reshape(6, 10), read_only), (kept, kept)):
        with raises(ConfigError, "read-only"):
            mpi.allreduce(x, algorithm="direct", out=out)
    for _, allreduce in dense_algorithms():
        both = np.concatenate([base, base[:1]])
        total = allreduce(both[:-1].copy(), chunk=64)
        allreduce(both[:-1], out=both[1:], chunk=64)  # they overlap
        np.testing.assert_array_equal(both[1:], total)
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
    """On one level and by way of nodes."""
    x, ring = np.ones(3), {"algorithm": "ring"}
    for more in ({}, {"nodes": 1}, {"nodes": 2}):
        allreduce = functools.partial(mpi.allreduce, **more)
        refused(
            ConfigError,
            (lambda f=allreduce: f(x, algorithm="tree"), "algorithm must be one of", "ring.*tree"),
            (lambda f=allreduce: f(x, op="min", **ring), "op='min'", "sum"),
            (lambda f=allreduce: f(x, out=np.ones(4), **ring), "out is", "alike"),
            (lambda f=allreduce: f(x, chunk=1, **ring), "chunk"),
        )
        refused(
            UnsupportedError,
            (lambda f=allreduce: f(np.ones(3, int), op="mean", **ring), "mean of int64", "sum"),
            (lambda f=allreduce: f(np.ones(3, complex), **ring), "complex128", "convert"),
            (lambda f=allreduce: f([1.0, 2.0], **ring), "list", "NumPy"),
            (lambda f=allreduce: f(np.ones(3, ">f4"), **ring), "byte order"),
        )
