"""What is known of a network from two sums, and of methods from a sample of a model's tensors."""

import math

import numpy as np
import pytest

from hvd_compress.advisor import MODELS, Network, estimates, kept, measured
from hvd_compress.advisor.estimates import elements_of, estimated, sampled, scaled_from_kept

SHAPES = {f"{i}.weight": (60, 80) for i in range(12)} | {f"{i}.bias": (60,) for i in range(12)}


@pytest.mark.parametrize(("ranks", "hosts"), [(2, 2), (16, 16), (4, 1), (8, 2), (6, 3)])
def test_a_network_is_found_again_from_its_sums(ranks, hosts):
    inner = {"inner_bandwidth": 2e9, "inner_latency": 3e-4} if hosts == 1 else {}
    there = Network(ranks, 2e9, 3e-4, hosts, **inner)
    short, long = there.seconds("sum", 4), there.seconds("sum", 2**22)
    found = Network.fitted(ranks, hosts, short, long, 2**22)
    assert found.ranks_per_host == there.ranks_per_host
    for kind in ("sum", "gather", "alltoall"):
        for nbytes in (100, 2**20):
            seconds = there.seconds(kind, nbytes)
            assert found.seconds(kind, nbytes) == pytest.approx(seconds, rel=0.02)


def test_hosts_that_do_not_divide_the_ranks_are_as_many_as_these():
    assert Network.fitted(5, 2, 1e-4, 1e-2, 2**20).hosts == 5


@pytest.mark.parametrize(("short", "long"), [(0.0, 0.0), (1e-3, 1e-3), (1e-3, 1e-5), (0.0, 1e9)])
def test_times_that_cannot_be_are_a_network_all_the_same(short, long):
    for hosts in (1, 2, 4):
        assert math.isfinite(Network.fitted(4, hosts, short, long, 2**20).seconds("sum", 1000))


@pytest.mark.parametrize("model", ["resnet50", "ptb_lstm", "bert_base", "vgg16"])
def test_a_sample_has_some_of_all_sizes(model):
    shapes = MODELS[model]()
    sample = sampled(shapes)
    assert 2**16 < elements_of(sample) <= 2**21
    assert sample.keys() <= shapes.keys()
    assert {len(shape) for shape in sample.values()} == {len(shapes[name]) for name in sample}


def test_small_models_are_taken_whole():
    odd = {"scalar": (), "empty": (0,), "matrix": (20, 30)}
    assert sampled(odd) == odd
    assert sampled({}) == {}
    assert estimated(["topk", "powersgd"], odd).keys() == {"none", "fp16", "topk", "powersgd"}


@pytest.mark.parametrize("method", ["none", "fp16", "topk:density=0.01", "linear", "powersgd"])
def test_bytes_of_a_sample_are_those_of_the_whole(monkeypatch, method):
    monkeypatch.setattr(estimates, "sampled", lambda shapes: sampled(shapes, 2**13))
    found, whole = estimated([method], SHAPES)[method], measured(method, SHAPES, steps=1)
    assert found.nbytes(4) == pytest.approx(whole.nbytes(4), rel=0.1)
    assert found.messages.keys() == whole.messages.keys()
    assert found.before > 0


def test_when_time_is_over_the_rest_is_what_is_kept():
    moments = iter(np.arange(1000.0))
    pieces = estimated(
        ["topk:density=0.01", "linear", "efsignsgd", "ef21"],
        SHAPES,
        seconds=1.5,
        now=lambda: next(moments),
    )
    about = scaled_from_kept(["linear", "efsignsgd"], elements_of(SHAPES), pieces)
    assert {name: pieces[name] for name in about} == about
    assert "ef21" not in pieces  # of which nothing is kept
    ratio = elements_of(SHAPES) / elements_of(MODELS["resnet50"]())
    own = kept("resnet50")["linear"]
    assert pieces["linear"].nbytes(2) == pytest.approx(ratio * own.nbytes(2), rel=0.01)
    assert pieces["linear"].buckets == 1
