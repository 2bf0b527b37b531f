"""Fixtures that several laws of PyTorch share."""

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture
def ranks(request):
    """That many ranks, of which this process is the first and the others are not there."""
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield request.param
    dist.destroy_process_group()
