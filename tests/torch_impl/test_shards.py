"""Compressed shards: laws in one process, and scenarios in a real job that torchrun starts."""

from __future__ import annotations

import re
import threading
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import hvd_compress.torch as hvd
from hvd_compress.codecs import float8, linear
from hvd_compress.errors import CollectiveTimeout
from hvd_compress.torch import lost_ranks
from hvd_compress.torch.ddp import shard_hops as hops
from hvd_compress.torch.ddp.fsdp import ShardedParameter
from tests import jobs, shards_worker

RANKS = 4
CODECS = [linear(bits=8, column=512), linear(bits=4, column=512), linear(bits=3, column=None)]
CODECS += [float8("e4m3", 512), float8("e5m2", None)]
PARTS = [
    ShardedParameter("a", None, 700, False),
    ShardedParameter("b", None, 33, True),
    ShardedParameter("c", None, 1301, False),
]


@pytest.mark.parametrize("ranks", [RANKS], indirect=True)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_messages_are_the_codes_of_numpy(ranks, rows, codec, messages):
    random = np.random.default_rng(0)
    elements = sum(part.elements for part in PARTS)
    x = random.standard_normal((rows * ranks, elements)).astype(np.float32)
    hop = hops.Hop(PARTS, codec, torch.float32, None, rows, torch.empty(0), 0.8)
    out, note = hop(torch.from_numpy(x.copy()))
    sent = messages[0].numpy().reshape(ranks, rows, -1)
    for q, row in enumerate(x):
        bytes_ = sent[q % ranks, q // ranks]
        assert bytes_[:4].view(np.float32) == 0
        for part, span in zip(
            PARTS, (slice(0, 700), slice(700, 733), slice(733, None)), strict=True
        ):
            if part.is_exempt:
                place = hop.row.plain[part.name].bytes
                assert bytes_[place].tobytes() == row[span].tobytes()
            else:
                place = hop.row.coded[part.name].bytes
                own = codec.for_shape((part.elements,))
                assert bytes_[place].tobytes() == own.encode(row[span], random).tobytes()
    # Of equal messages the sum is that of what rank 0 has sent to all, in float32.
    own = [codec.for_shape((part.elements,)) for part in PARTS]
    code = sent[:, 0, hop.row.coded["a"].bytes]
    total = np.zeros(700, np.float32)
    for each in code:
        total += own[0].decode(each, 700, np.dtype(np.float32))
    assert out[0, :700].numpy().tobytes() == total.tobytes()
    assert note == 0


@pytest.mark.parametrize("ranks", [RANKS], indirect=True)
def test_what_waits_follows_loco(ranks, messages):
    """In NumPy, with the residual's own codes: e = beta e + (1 - beta) (h - sent)."""
    random, codec, beta = np.random.default_rng(0), linear(bits=4, column=512), 0.8
    kept = linear(bits=8, column=512)
    parts = [ShardedParameter("a", None, 1024, False)]
    hop = hops.Hop(parts, codec, torch.float32, None, 1, torch.empty(0), beta)
    waits = np.zeros(ranks * 1024, np.float32)  # e / (1 - beta)
    for _ in range(4):
        g = random.standard_normal(ranks * 1024).astype(np.float32)
        hop.settle(hop(torch.from_numpy(g.copy()).view(ranks, -1))[1])
        h = g + np.float32(1 - beta) * waits
        sent = codec.decode(codec.encode(h, random), h.size, h.dtype)
        waits = np.float32(beta) * waits + (h - sent)
        waits = kept.decode(kept.encode(waits, random), h.size, h.dtype)
        found = torch.empty(ranks * 1024)
        hop._kept.read(hop.waits.view(-1), found)
        scale = np.abs(waits).max() / 127
        assert np.abs(found.numpy() - waits).max() < 1.01 * scale  # a level, where rounding differs
    assert hop.norm()["a"] == pytest.approx(np.linalg.norm(waits), rel=1e-2)


class Launches(TorchDispatchMode):
    """Counts operations, and those for which a host would wait."""

    def __init__(self):
        super().__init__()
        self.number = self.waits = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += 1
        name = function.overloadpacket.__name__
        self.waits += name in ("_local_scalar_dense", "nonzero", "equal")
        return function(*args, **(kwargs or {}))


def steady_step(**options):
    """The operations of a step and those that wait, and what was sent."""
    layers = [torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)]
    model = torch.nn.Sequential(*layers)
    for part in (*layers, model):
        fully_shard(part)
    exchange = hvd.compress_shards(model, "linear:bits=4", **options)
    for _ in range(2):
        with Launches() as launches:
            model(torch.ones(2, 64)).sum().backward()
    return launches.number, launches.waits, exchange.stats().total


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("options", [{}, {"parameters": "linear"}, {"residual": None}], ids=str)
def test_launches_do_not_grow_with_the_ranks_and_the_host_waits_for_nothing(options, monkeypatch):
    monkeypatch.setattr(hops, "agree", None, raising=False)
    monkeypatch.setattr("hvd_compress.torch.ddp.shard_exchange.agree", lambda *_: None)
    found = []
    for ranks in (16, 64):
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        try:
            number, waits, total = steady_step(**options)
        finally:
            dist.destroy_process_group()
        assert waits == 0
        assert total.bytes_sent < total.dense_bytes
        found.append(number)
    assert found[0] == found[1]


@pytest.mark.timeout(60)
def test_a_store_that_is_silent_ends_the_wait_for_other_ranks(alone, monkeypatch):
    """PyTorch asks it without a time-out, and its process may be stopped."""
    goes_on = threading.Event()
    store = SimpleNamespace(timeout=timedelta(seconds=0.1), add=lambda *_: goes_on.wait())
    monkeypatch.setattr(lost_ranks, "_PATIENCE", 0.1)
    words = r"forget_parameters\(\) was called on rank 0, and the job's store, .* is silent"
    with monkeypatch.context() as patch:
        patch.setattr(distributed_c10d, "_get_default_store", lambda: store)
        with pytest.raises(CollectiveTimeout, match=words):
            lost_ranks.meet(dist.group.WORLD, "forget_parameters()")
    goes_on.set()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_one_rank_trains_as_without(alone):
    losses = []
    for method in (None, "linear:bits=4"):
        torch.manual_seed(0)
        model = fully_shard(torch.nn.Linear(5, 3))
        exchange = method and hvd.compress_shards(model, method, parameters="linear")
        model(torch.ones(2, 5)).square().sum().backward()
        losses.append(model.weight.grad.full_tensor())
        if exchange:
            exchange.load_state_dict(exchange.state_dict())
            assert exchange.stats().total.bytes_sent == 0
    assert torch.equal(*losses)


def test_the_bytes_of_an_element_are_those_of_the_page():
    page = (jobs.ROOT / "docs" / "fsdp.md").read_text()
    page = page.split("\n## Which method for shards\n")[1].split("\n## ")[0]
    for name, codec in (("linear", CODECS[0]), ("fp8", CODECS[3]), ("linear:bits=4", CODECS[1])):
        (found,) = re.findall(
            rf'^\| .*"{name}" \| ([\d.]+) \||^\| "{name}", .* ([\d.]+) \|', page, re.M
        )
        assert float("".join(found)) == round(codec.bits_per_element(512) / 8, 3)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("job", "name"),
    jobs.cases([jobs.worker("shards_worker", RANKS, shards_worker.SCENARIOS)]),
)
def test_scenario(passes, job, name):
    passes(job, name)
