"""Tensors of torch, in host memory, in all collectives; bfloat16, which NumPy does not have."""

from __future__ import annotations

import numpy as np
import torch

from hvd_compress import Sparse, mpi
from hvd_compress.errors import UnsupportedError
from tests.mpi_scenarios.common import (
    array,
    arrays,
    assert_same_everywhere,
    dense_algorithms,
    raises,
    world,
)
from tests.mpi_scenarios.dense import CHUNK, SIZES
from tests.mpi_scenarios.hierarchical import rounded_once_for_both_levels
from tests.mpi_scenarios.sparse import ALGORITHMS as SPARSE
from tests.mpi_scenarios.sparse import vector

P, RANK = world.size, world.rank


def tensors_come_back_as_tensors() -> None:
    base = array(RANK, 60, "float32")
    want = mpi.allreduce(base, algorithm="direct")
    tensor = torch.from_numpy(base.copy()).view(6, 10)
    total = mpi.allreduce(tensor, algorithm="direct")
    assert isinstance(total, torch.Tensor)
    np.testing.assert_array_equal(total.numpy(), want.reshape(6, 10))
    weight = torch.nn.Parameter(tensor.clone())
    assert torch.equal(mpi.allreduce(weight, algorithm="direct"), total)
    with raises(UnsupportedError, "x.detach()", "hvd_compress.torch.mpi"):
        mpi.allreduce(2 * weight, algorithm="direct")
    with torch.no_grad():
        assert torch.equal(mpi.allreduce(2 * weight, algorithm="direct"), 2 * total)
    assert mpi.allreduce(tensor, algorithm="direct", out=tensor) is tensor
    assert torch.equal(tensor, total)


def bfloat16_is_rounded_once() -> None:
    for name, allreduce in dense_algorithms():
        for n in SIZES:
            everyones = [torch.from_numpy(x).bfloat16() for x in arrays(n, "float32")]
            mine = everyones[world.rank]
            exact = torch.stack([x.double() for x in everyones]).sum(0)
            magnitude = torch.stack([x.double().abs() for x in everyones]).sum(0)
            total = allreduce(mine, chunk=CHUNK)
            assert total.dtype == torch.bfloat16
            assert total.shape == mine.shape
            bound = 2.0**-8 * exact.abs() + world.size * 2.0**-23 * magnitude
            assert ((total.double() - exact).abs() <= bound).all(), name
            assert_same_everywhere(total.float().numpy())
            largest = allreduce(mine, op="max", chunk=CHUNK)
            assert torch.equal(largest, torch.stack(everyones).max(0).values)


def bfloat16_is_rounded_once_for_both_levels() -> None:
    rounded_once_for_both_levels(lambda x: torch.from_numpy(x).bfloat16())


def sparse_tensors_come_back_as_tensors() -> None:
    n = 200
    brought = [vector(rank, n, 20) for rank in range(P)]
    mine = Sparse(torch.from_numpy(brought[RANK].indices), torch.from_numpy(brought[RANK].values))
    narrow = Sparse(mine.indices.int(), mine.values.half())
    for algorithm in SPARSE:
        got = mpi.sparse_allreduce(mine, n, algorithm=algorithm)
        want = mpi.sparse_allreduce(brought[RANK], n, algorithm=algorithm)
        assert isinstance(got.dense(n), torch.Tensor)
        np.testing.assert_array_equal(got.dense(n).numpy(), want.dense(n))
        assert mpi.sparse_allreduce(narrow, n, algorithm=algorithm).dense(n).dtype == torch.float16
    for theirs, want in zip(mpi.sparse_allgather(mine, n), brought, strict=True):
        assert theirs.indices.dtype == torch.int64
        np.testing.assert_array_equal(theirs.values.numpy(), want.values)


def refusals_name_the_way_out() -> None:
    with raises(UnsupportedError, "sparse"):
        mpi.allreduce(torch.eye(3).to_sparse(), algorithm="ring")
    with raises(UnsupportedError, "bfloat16", "float32"):
        mpi.sparse_allreduce(Sparse(torch.arange(2), torch.ones(2).bfloat16()), 5)
