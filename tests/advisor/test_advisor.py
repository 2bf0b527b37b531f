"""The advisor: formulas by hand, pieces against real messages, and choices."""

import dataclasses
import math

import numpy as np
import pytest

from benchmarks.regret import cells
from hvd_compress import advisor
from hvd_compress.advisor import (
    CANDIDATES,
    MODELS,
    MeasuredLoss,
    Network,
    Piece,
    allowed,
    break_even,
    choose,
    kept,
    loss_of,
    losses,
    measured,
    step_of,
)
from hvd_compress.advisor.pieces import Messages, from_json, to_json
from hvd_compress.engines.lockstep import World
from hvd_compress.errors import ConfigError
from hvd_compress.methods import as_compressor

SHAPES = {"a": (30, 40), "b": (40,), "c": (64, 64)}


def piece(nbytes=1_000_000, before=0.0, after=0.0, each=0.0, kind="sum", buckets=1):
    return Piece({kind: Messages(nbytes, 0, 1)}, buckets, before, after, each)


def test_seconds_of_exchanges_by_hand():
    one_each = Network(4, bandwidth=8e6, latency=0.5)  # a byte takes a microsecond
    # 2 n (P - 1) / P bytes, and twice log2 P rounds
    assert one_each.seconds("sum", 4000) == pytest.approx(2 * 2 * 0.5 + 2 * 4000 * 3 / 4 * 1e-6)
    assert one_each.seconds("gather", 4000) == pytest.approx(2 * 0.5 + 3 * 4000 * 1e-6)
    assert one_each.seconds("alltoall", 4000) == pytest.approx(2 * 0.5 + 3000e-6)
    assert one_each.seconds("gather", 4000, 3) == pytest.approx(3 * 2 * 0.5 + 3 * 4000 * 1e-6)
    assert Network(1, 8e6).seconds("sum", 10**9) == 0.0


def test_seconds_of_exchanges_on_hosts_of_two_ranks():
    network = Network(4, 8e6, 0.5, hosts=2, inner_bandwidth=8e9, inner_latency=0.25)
    # Two bytes of four pass the line of each host, and three of four arrive inside it.
    assert network.seconds("gather", 4000) == pytest.approx(0.5 + 0.25 + 8000e-6 + 12000e-9)
    # Both ranks of a host send half of theirs over its line, and a quarter to each other.
    assert network.seconds("alltoall", 4000) == pytest.approx(0.5 + 0.25 + 4000e-6 + 1000e-9)
    # Summed up inside, between the two hosts, and handed out.
    assert network.seconds("sum", 4000) == pytest.approx(2 * 0.75 + 4000e-6 + 4000e-9)
    alone = Network(4, 8e6, 0.5, hosts=1, inner_bandwidth=8e9, inner_latency=0.25)
    assert alone.seconds("alltoall", 4000) == pytest.approx(2 * 0.25 + 3000e-9)


def test_a_step_is_a_pipeline_of_buckets():
    network = Network(2, bandwidth=8e6, latency=0.0)  # a sum of n bytes takes n microseconds
    slow = step_of(piece(400_000, before=0.1, after=0.05, each=0.01, buckets=4), network, 0.1)
    # 0.2 s to compute, 0.4 s to send: 0.05 until the first bucket, 4 x 0.1, and 0.07 to read.
    assert slow.whole == pytest.approx(0.05 + 0.4 + 0.07)
    assert (slow.processor, slow.wire) == (pytest.approx(0.17), pytest.approx(0.4))
    fast = step_of(piece(40_000, buckets=4), network, 0.2)  # all is hidden but the last bucket
    assert fast.whole == pytest.approx(0.2 + 0.01)
    assert step_of(piece(before=1.0), Network(1, 1e9), 0.3).whole == 0.3


@pytest.mark.parametrize("method", ["none", "topk:density=0.1", "qsgd"])
def test_pieces_have_the_bytes_of_real_messages(method):
    found = measured(method, SHAPES, steps=1)
    world = World(as_compressor(method), 3)
    random = np.random.default_rng(0)
    for _ in range(2):
        before = world.record.bytes_sent
        world.exchange_all(
            [{k: random.standard_normal(s, np.float32) for k, s in SHAPES.items()} for _ in "abc"]
        )
    sent = world.record.bytes_sent - before
    assert found.nbytes(3) == pytest.approx(sent, rel=0.05)
    assert found.before > 0


def test_what_is_shared_between_ranks_shrinks_with_their_number():
    found = measured("fp8", {"a": (600, 1000)}, steps=1).messages
    assert found["alltoall"].shared < 0.01 * found["alltoall"].whole
    # Of 600,000 elements in 8 bits each rank hands on its own part.
    assert found["gather"].nbytes(8) == pytest.approx(75_000, rel=0.05)


def test_an_error_on_one_rank_is_an_error():
    with pytest.raises(ConfigError, match="density"):
        measured("topk:density=7", SHAPES)
    with pytest.raises(TypeError):
        measured("topk", {"a": ("x",)})


def test_pieces_are_kept():
    for model in MODELS:
        pieces, shapes = kept(model), MODELS[model]
        assert pieces.keys() == {c.method for c in CANDIDATES}, "python -m hvd_compress.advisor"
        dense = 4 * sum(map(math.prod, shapes().values()))
        assert pieces["none"].nbytes(2) == dense
        assert pieces["fp16"].nbytes(2) == dense / 2
    assert from_json(to_json(pieces["fp8"])) == pieces["fp8"]


def test_what_is_exact_has_no_residual():
    for candidate in CANDIDATES:
        method = as_compressor(candidate.method).for_tensor("a", (30, 40))
        state = method.init(np.ones((30, 40), np.float32))
        assert not (candidate.is_exact and state), candidate


def test_one_that_loses_more_must_gain_two_percent():
    pieces = {"none": piece(before=1.0), "fp16": piece(before=0.99), "linear": piece(before=0.975)}
    network = Network(2, 1e15, latency=0.0)
    assert choose(pieces, network).method == "fp16"
    pieces["linear"] = piece(before=0.9)
    assert choose(pieces, network).method == "linear"
    exact = [candidate for candidate in CANDIDATES if candidate.is_exact]
    assert choose(pieces, network, among=exact).method == "fp16"


LOSSES = (
    *(
        MeasuredLoss("bytes", 1000, method, lost, 3)
        for method, lost in (("none", 0.0), ("onebit", 3.0))
    ),
    MeasuredLoss("bytes", 1000, "topk:density=0.01", math.inf, 1),
    *(MeasuredLoss("bytes", 16_000, method, 0.4, 3) for method in ("linear", "topk:density=0.01")),
    *(MeasuredLoss("mnist", 1000, method, 0.1, 3) for method in ("linear", "topk:density=0.01")),
)


@pytest.fixture
def few_losses(monkeypatch):
    monkeypatch.setattr(losses, "all_losses", lambda: LOSSES)


def rows_allowed(*args, **options):
    return [c.row for c in allowed(*args, **options)]


@pytest.mark.usefixtures("few_losses")
def test_what_was_never_trained_or_loses_more_is_never_chosen():
    assert rows_allowed("adamw", 1000) == ["none", "linear"]
    assert rows_allowed("adamw", 16_000) == ["none", "linear", "topk:density=0.01"]
    assert rows_allowed("adamw", 1000, tolerance=5.0) == ["none", "linear", "onebit"]
    assert rows_allowed("sgd", 1000, tolerance=0.05) == ["none"]
    assert rows_allowed("muon", 1000) == ["none"]


@pytest.mark.usefixtures("few_losses")
def test_the_nearest_training_is_that_of_the_nearest_length():
    for steps, lost in ((10, math.inf), (3999, math.inf), (4001, 0.4), (10**6, 0.4)):
        assert loss_of("topk:density=0.01", "adamw", steps).lost == lost
    assert str(loss_of("topk:density=0.01", "adamw", 1)) == "diverges"
    assert str(loss_of("linear", "sgd", 1)) == "0.10 points"
    assert loss_of("fp8", "adamw", 1000) is None


def test_dense_steps_at_the_start_are_counted():
    pieces = {"none": piece(before=1.0), "onebit_adam": piece(before=0.2)}
    [candidate] = [c for c in CANDIDATES if c.row == "onebit_adam"]
    step = advisor.average_step(candidate, pieces, Network(2, 1e15, latency=0.0))
    assert step.whole == pytest.approx(0.2 * 1.0 + 0.8 * 0.2)
    assert "freeze_step=200)" in candidate.written(1000)


def test_break_even_is_where_the_steps_are_equal():
    small, large, network = piece(1000, before=0.1), piece(100_000), Network(4, 1e9)
    rate = break_even(small, large, network)
    there = dataclasses.replace(network, bandwidth=rate)
    assert step_of(small, there).whole == pytest.approx(step_of(large, there).whole, rel=0.02)
    assert break_even(small, piece(1000), network) is None
    assert break_even(piece(1000), large, network) == math.inf


def test_whether_the_network_is_the_bottleneck():
    pieces = {"fp16": piece(10_000_000)}
    assert advisor.is_bottleneck(pieces, Network(4, 1e8), 0.1)
    assert not advisor.is_bottleneck(pieces, Network(4, 1e12), 0.1)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"ranks": 0}, "ranks"),
        ({"bandwidth": 0}, "bandwidth"),
        ({"bandwidth": math.nan}, "bandwidth"),
        ({"latency": -1.0}, "latency"),
        ({"hosts": 3}, "hosts=3"),
        ({"inner_bandwidth": math.inf}, "inner_bandwidth"),
    ],
)
def test_networks_that_are_none(wrong, named):
    with pytest.raises(ConfigError, match=named):
        Network(**{"ranks": 4, "bandwidth": 1e9, **wrong})


def test_choices_lose_little():
    pieces = {model: kept(model) for model in MODELS}
    found = list(cells(pieces))
    assert len(found) >= 200
    assert max(cell.regret for cell in found) <= 1.05
    assert max(cell.behind for cell in found) <= 1.02
    assert {"fp16", "powersgd:rank=2"} < {cell.chosen for cell in found}
    wrong = list(cells(pieces, error=0.1))
    assert np.mean([cell.regret for cell in wrong]) <= 1.01


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


def test_models_with_odd_shapes_are_measured():
    odd = {"scalar": (), "empty": (0,), "matrix": (20, 30)}
    for method in ("topk", "powersgd"):
        assert measured(method, odd, steps=1).nbytes(2) > 0
