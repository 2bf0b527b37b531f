"""The exchange between replicas of a sharded model, in a real job that torchrun starts."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

from hvd_compress.errors import UnsupportedError
from hvd_compress.torch.parameters import check_plain, is_sharded, local
from hvd_compress.torch.replicas import is_group
from tests import fsdp_worker, jobs

RANKS = 4


def test_plain_tensors_are_no_shards():
    x = torch.ones(3)
    assert local(x) is x
    assert not is_sharded(x)
    assert not is_group(x)
    assert not is_group(None)


def test_an_optimizer_of_shards_says_what_works():
    """Without ranks: of the class alone."""
    shard = torch.Tensor._make_subclass(DTensor, torch.ones(3))
    with pytest.raises(UnsupportedError, match=r"hvd_compress\.torch\.compress_replicas\(model"):
        check_plain(shard)


JOB = jobs.worker(
    "fsdp_worker",
    RANKS,
    [name for name in fsdp_worker.SCENARIOS if name not in fsdp_worker.LEFT_OUT],
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [pytest.param(name, id=f"{JOB}@{name}") for name in fsdp_worker.SCENARIOS]
)
def test_scenario(passes, name):
    if name in fsdp_worker.LEFT_OUT:
        pytest.skip(fsdp_worker.LEFT_OUT[name])
    passes(JOB, name)
