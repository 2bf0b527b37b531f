"""Resident memory over steps and over optimizers: a short run of the campaign of memory, of which
docs/reliability.md has the long one."""

from __future__ import annotations

import pytest
import torch

import hvd_compress.torch.mpi as hvd
from benchmarks.reliability.memory import ALLOWED, made_and_dropped, over, trained

hvd.init()


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", ["none", "dgc:density=0.05", "powersgd", "fp8"])
def test_memory_stays_as_it_is(method):
    """A tensor of the model has 80 KB: one that is left behind in each turn would be 8 MB.
    In the first hundreds of turns the C library's memory grows by some MB, and then no more."""
    for turn, count in ((trained(method), 200), (made_and_dropped(method), 190)):
        _, grows = over(turn, count)
        assert grows <= 2 * ALLOWED
