"""Fixtures that several laws of PyTorch share."""

import os

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from hvd_compress.torch import backend


@pytest.fixture
def ranks(request):
    """That many ranks, of which this process is the first and the others are not there."""
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


@pytest.fixture
def messages(monkeypatch):
    """Those of shards to the ranks, one after the other; they arrive as they are."""
    found = []

    def sent(arrived, message, group):
        found.append(message.clone())
        arrived.copy_(message)

    monkeypatch.setattr(dist, "all_to_all_single", sent)
    return found


@pytest.fixture
def alone():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def by_triton(monkeypatch):
    """The addresses of tensors that are on the host nevertheless."""
    on_host = set()
    if os.environ.get("TRITON_INTERPRET") == "1":  # else the device says so

        def loops(x):
            is_host = x.data_ptr() in on_host
            return "hvd_compress.kernels" if is_host else "hvd_compress.torch.triton.loops"

        monkeypatch.setattr(backend, "loops", loops)
    return on_host
