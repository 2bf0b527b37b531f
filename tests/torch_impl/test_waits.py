"""How often the host waits for a GPU: for a message, the same whatever the number of ranks.

A GPU is not needed: tensors that would be in its memory are of a class of their own, which counts
what would wait, and a process group of PyTorch's for tests has as many ranks as one likes.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hvd_compress.engines.joining import counted
from hvd_compress.requests import Alltoall, Gather
from hvd_compress.stats import Record
from hvd_compress.torch import backend
from hvd_compress.torch.process_groups import ProcessGroupEngine

WAITING = {"tolist", "item", "numpy", "cpu", "to", "__bool__", "__int__", "__float__"}


class OnGPU(torch.Tensor):
    """A tensor that stands for one in a GPU's memory."""

    waits = 0
    is_cuda = True

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        OnGPU.waits += name in WAITING
        return super().__torch_function__(function, types, args, kwargs or {})


class OverNCCL(ProcessGroupEngine):
    """Takes what is on a "GPU" only."""

    reads_host = False

    def _reachable(self, tensor):
        return tensor if tensor.is_cuda else tensor.clone().as_subclass(OnGPU)


@pytest.fixture
def waits(monkeypatch):
    """The number of waits so far."""

    def to_numpy(x):
        OnGPU.waits += isinstance(x, OnGPU)
        return x.as_subclass(torch.Tensor).numpy()

    monkeypatch.setattr(backend, "to_numpy", to_numpy)
    OnGPU.waits = 0
    return lambda: OnGPU.waits


def reading(request):
    """An exchange that reads all that arrives, as those of messages do."""
    return [backend.to_numpy(x) for x in (yield request)]


@pytest.mark.parametrize("ranks", [16, 64], indirect=True)
@pytest.mark.parametrize(
    ("kind", "expected"), [("gather", 2), ("gather of equal sizes", 1), ("alltoall", 1)]
)
def test_a_message_in_host_memory_is_waited_for_as_often_whatever_the_ranks(
    ranks, waits, kind, expected
):
    own = torch.arange(1, 41, dtype=torch.uint8)
    request = Alltoall([own] * ranks) if kind == "alltoall" else Gather(own, "equal" in kind)
    engine, record = OverNCCL(None, torch.device("cpu")), Record()
    engine.start("x", counted(reading(request), record, engine.rank, engine.size))
    arrived = engine.finish()["x"]
    assert len(arrived) == ranks
    assert waits() == expected
    assert not any(isinstance(x, OnGPU) for x in arrived)
    np.testing.assert_array_equal(arrived[0], own.numpy())


def test_waits_are_counted(waits):
    """Otherwise all of these would pass without a reason."""
    x = torch.ones(3).as_subclass(OnGPU)
    _ = x.tolist(), float(x.sum()), (x * 2).cpu(), backend.to_numpy(x)
    assert waits() == 4
