"""A steady step of a hook whose tensors are on a GPU and whose messages travel over NCCL: the host
waits for nothing, and launches grow with neither tensors nor ranks.

As in ``triton_laws.py``: in Triton's interpreter, or on a GPU.  A process group of PyTorch's for
tests has as many ranks as one likes.
"""

from __future__ import annotations

import collections

import numpy as np
import pytest
import torch
import triton

from hvd_compress.codecs import float8, linear
from hvd_compress.reduce import Reducer
from hvd_compress.torch.ddp.fsdp import ShardedParameter
from hvd_compress.torch.ddp.shard_hops import Hop
from hvd_compress.torch.process_groups import ProcessGroupEngine
from tests.torch_impl.triton_laws import DEVICE, FEW, INTERPRETED, waits_of

#: and how many kernels of ours are launched for a bucket of matrices and one of vectors
METHODS = {
    "none": 3,
    "topk:density=0.004": 11,
    "dgc:density=0.004,min_size=100": 11 + 4,
    "powersgd:rank=2": 8 + 3,
    "onebit": 21,
    "fp8": 17,
    "linear:bits=4": 19,
    "qsgd": 9,
}

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


@pytest.fixture
def ranks(ranks, by_triton, monkeypatch):
    """On a device whose messages stay there."""
    monkeypatch.setattr(ProcessGroupEngine, "reads_device", True)
    return ranks


@pytest.fixture
def launches(monkeypatch):
    """The kernels that are launched, by name."""
    kind = type(triton.jit(_nothing))
    found, launched = collections.Counter(), kind.__getitem__

    def noted(kernel, grid):
        found[kernel.fn.__name__] += 1
        return launched(kernel, grid)

    monkeypatch.setattr(kind, "__getitem__", noted)
    return found


def _nothing():
    pass


#: of each way to exchange one, since the interpreter does the work of a GPU one after the other
ON_MANY = ["topk:density=0.004", "onebit", "qsgd"] if INTERPRETED and FEW else METHODS
MANY = 6 if INTERPRETED and FEW else 16


@pytest.mark.parametrize(
    ("ranks", "tensors", "method"),
    [*((2, 3, method) for method in METHODS), *((MANY, 1, method) for method in ON_MANY)],
    indirect=["ranks"],
)
def test_the_host_waits_for_nothing_and_launches_do_not_grow(
    ranks, tensors, launches, method, monkeypatch
):
    from hvd_compress.torch.triton import tasks

    momentum, engine = 0.9 * method.startswith("dgc"), ProcessGroupEngine(None, DEVICE)
    reducer = Reducer(method, engine, momentum=momentum, same_order=True, in_place=True)
    shapes = [(32, 32 * ranks)] * tensors + [(16,)] * tensors
    gradients = {f"{i}": torch.randn(shape, device=DEVICE) for i, shape in enumerate(shapes)}
    for _ in range(2):
        reducer.reduce(gradients)
    launches.clear()
    # No table is uploaded again, since all arrays are where they were.
    monkeypatch.setattr(tasks, "from_numpy", None)
    assert waits_of(lambda: reducer.reduce(gradients)) == 0
    assert launches.total() == METHODS[method], launches


@pytest.mark.parametrize(
    ("ranks", "codec"), [(2, float8()), (MANY, linear(4, 512))], indirect=["ranks"]
)
def test_shards_have_the_codes_of_numpy_and_the_host_waits_for_nothing(
    ranks, codec, launches, messages
):
    random = np.random.default_rng(0)
    parts = [
        ShardedParameter("a", None, 700, False),
        ShardedParameter("b", None, 33, True),
        ShardedParameter("c", None, 65, False),
    ]
    hop = Hop(parts, codec, torch.float32, None, 1, torch.empty(0, device=DEVICE), 0.8)
    x = random.standard_normal((ranks, 798)).astype(np.float32)
    given = torch.from_numpy(x).to(DEVICE)

    def step():
        sums, note = hop(given.clone())
        hop.settle(note)
        return sums

    first = step()
    rows = messages[0].view(ranks, -1).cpu().numpy()
    a, c = (hop.row.coded[name] for name in ("a", "c"))
    total = np.zeros(65, np.float32)
    for row, own in zip(rows, x, strict=True):
        assert row[a.bytes].tobytes() == codec.encode(own[a.span], random).tobytes()
        assert row[c.bytes].tobytes() == codec.encode(own[c.span], random).tobytes()
        total += codec.decode(row[c.bytes], 65, np.dtype(np.float32))
    assert first[0, c.span].cpu().numpy().tobytes() == total.tobytes()
    launches.clear()
    assert INTERPRETED or waits_of(step) == 0  # the interpreter counts all copies
    if INTERPRETED:
        step()
    assert launches.total() == (10 if isinstance(codec, float8) else 11), launches
    given[0, 0] = torch.nan
    waits = hop.waits.clone()
    assert step().isnan().all()
    assert torch.equal(hop.waits, waits)
