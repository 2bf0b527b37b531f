"""The parameter server in one process, by hand-computed numbers and laws."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from hvd_compress import StagedWarmup, TopK, method_names
from hvd_compress.base import Context, Sparse
from hvd_compress.blocks import allgather, chain, clip_by_local_norm, top_k
from hvd_compress.errors import ConfigError, PayloadError
from hvd_compress.optimizers import LAMB
from hvd_compress.systems.servers import (
    SGD,
    Link,
    Rules,
    Server,
)
from hvd_compress.systems.servers.optimizers import ArrayOptimizer
from hvd_compress.systems.servers.server import LinkCoder
from tests.systems.servers import Recorder
from tests.systems.servers.simulation import Simulation


def one_number(rules, workers=2, start=1.0, lr=0.1, gradient=None):
    """f = x^2 / 2."""
    gradient = gradient or (lambda worker, x, step: x)
    return Simulation({"x": np.array([start])}, gradient, workers, rules, SGD(lr=lr))


def value(simulation):
    return simulation.parameters["x"][0]


def everything(simulation):
    """All counters of the server."""
    return simulation.server.stats


# -- gradients that are not there -----------------------------------------------------------------


OPTIMIZERS = (SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1), LAMB(lr=0.1))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["sgd", "lamb"])
@pytest.mark.parametrize(
    "rules",
    [
        Rules(),
        Rules("async"),
        Rules("async", compression="topk:density=1.0"),
    ],
    ids=["sync", "async", "compressed"],
)
def test_a_parameter_without_gradient_is_where_it_would_be_without_these_steps(optimizer, rules):
    """Momentum and weight decay do not move it, and moments are those of its own steps."""

    def run(steps, there):
        def gradient(worker, x, step):
            return {"a": x["a"], "b": x["b"] + 1 if there(step) else None}

        start = {"a": np.full((3, 2), 2.0), "b": np.full(4, 3.0)}
        sim = Simulation(start, gradient, 1, rules, copy.deepcopy(optimizer))
        sim.run([0] * steps)
        return sim

    with_gaps, without = run(9, lambda step: step % 3 == 0), run(3, lambda step: True)
    np.testing.assert_array_equal(with_gaps.parameters["b"], without.parameters["b"])
    np.testing.assert_array_equal(with_gaps.links[0].parameters["b"], without.parameters["b"])
    assert (with_gaps.parameters["a"] != without.parameters["a"]).all()
    sim = run(4, lambda step: False)
    np.testing.assert_array_equal(sim.parameters["b"], np.full(4, 3.0))


def test_a_gradient_that_some_have_counts_as_zero_on_the_others():
    sim = one_number(Rules(), gradient=lambda worker, x, step: {"x": [x["x"], None][worker]})
    sim.run([0, 1])
    assert value(sim) == pytest.approx(1 - 0.1 / 2)
    assert everything(sim).updates == 1


def test_more_backup_workers_than_workers():
    with pytest.raises(ConfigError, match=r"backup=7 of 2 workers.*up to 1 here"):
        one_number(Rules(backup=7))
    with pytest.raises(ConfigError, match="backup=1 of 1 workers"):
        one_number(Rules(backup=1), workers=1)


# -- modes, by hand ----------------------------------------------------------------------------


def test_synchronous_by_hand():
    sim = one_number(Rules(), gradient=lambda worker, x, step: {"x": x["x"] + worker})
    sim.run([1])
    assert sim.is_waiting(1)
    assert value(sim) == 1
    sim.run([0])
    # The mean of 1 and 2
    assert value(sim) == pytest.approx(0.85)
    assert not sim.is_waiting(1)
    assert sim.links[0].parameters == sim.links[1].parameters == {"x": value(sim)}


def test_backup_workers_by_hand():
    sim = one_number(Rules(backup=1), workers=3)
    sim.run([0])
    assert value(sim) == 1
    sim.run([1])
    assert value(sim) == pytest.approx(0.9)
    sim.run([2])  # late, with the gradient at 1
    assert value(sim) == pytest.approx(0.9)
    assert everything(sim).dropped == {2: 1}
    assert not sim.links[2].taken
    sim.run([2, 0])
    assert value(sim) == pytest.approx(0.81)
    assert everything(sim).updates == 2
    assert everything(sim).pushes == 5
    assert everything(sim).staleness == {0: 4}


def test_asynchronous_by_hand():
    sim = one_number(Rules("async"), workers=3)
    sim.run([0, 1, 0])
    # -1 at 1, -1 at 1, -0.9 at 0.9
    assert value(sim) == pytest.approx(1 - 0.1 - 0.1 - 0.09)
    assert everything(sim).staleness == {0: 1, 1: 2}
    assert everything(sim).mean_staleness == pytest.approx(2 / 3)
    sim.run([2])
    assert everything(sim).staleness == {0: 1, 1: 2, 3: 1}


# -- laws --------------------------------------------------------------------------------------


def sendable(name):
    try:
        rules = Rules(compression=name)
        x = {"w": np.ones((4, 5), np.float32)}
        Link(x, 0, rules).push(x)
    except ConfigError:
        return False
    return True


ALL = (*method_names(), "efsignsgd:via=allgather", "signsgd:via=allgather")
SENDABLE = [name for name in ALL if not name.startswith("test-") and sendable(name)]


def test_most_methods_can_be_sent():
    wanted = {"none", "fp16", "bf16", "topk", "randomk", "powersgd", "natural", "scalecom"}
    assert wanted <= set(SENDABLE)
    assert not {"ef21", "oktopk", "onebit_adam"} & set(SENDABLE)
    x = {"w": np.ones(20)}
    link = Link(x, 0, Rules(compression="ef21"))
    with pytest.raises(ConfigError, match="compression='ef21' cannot be sent to a server"):
        link.push(x)
    for method, what in (
        ("dgc", "momentum"),
        (TopK(density=StagedWarmup("epoch")), "epochs"),
        (chain(clip_by_local_norm(1.0), via=allgather(top_k(0.1))), "norm"),
    ):
        with pytest.raises(ConfigError, match=f"cannot be sent to a server: it needs .*{what}"):
            Rules(compression=method)


@pytest.mark.parametrize("name", SENDABLE)
def test_a_server_reads_what_the_worker_sent(name):
    rules = Rules(compression=name)
    coder = LinkCoder(rules, 1, seed=3)
    rng, states = np.random.default_rng(0), {}
    shapes = {"w": np.zeros((60, 50), np.float32), "b": np.zeros(7), "none": np.zeros(0)}
    for step in range(3):
        x = {k: rng.standard_normal(v.shape).astype(v.dtype) for k, v in shapes.items()}
        before = copy.deepcopy(states)
        parts, states = coder.encode(x, states, step)
        found = coder.decode(parts, shapes, step, "worker 0")
        assert found.keys() == {"w", "b"}
        for key in ("w", "b"):
            assert found[key].dtype == x[key].dtype
            context = Context(key, step=step, seed=3 * 2**20 + 1)
            method = rules.compression.for_tensor(key, x[key].shape)
            state = before[key] if before else method.init(x[key])
            sent = method.encode(x[key], state, context).sent
            if isinstance(sent, Sparse):
                dense = np.zeros(x[key].size, sent.values.dtype)
                dense[np.asarray(sent.indices, np.int64)] = sent.values
                sent = dense
            np.testing.assert_array_equal(found[key], np.reshape(sent, x[key].shape))


@pytest.mark.parametrize("method", ["topk:density=0.1", "powersgd", "efsignsgd:via=allgather"])
@pytest.mark.parametrize("rules", [{"backup": 1}, {"mode": "async"}])
def test_error_feedback_loses_nothing(method, rules):
    """Gradients that were taken = what the server has used + residuals."""
    rng = np.random.default_rng(0)
    rules, total = Rules(compression=method, **rules), np.zeros((8, 8))
    server = Server({"x": np.zeros((8, 8))}, Recorder(), range(3), rules)
    links = [Link(server.parameters, worker, rules) for worker in range(3)]
    dropped, pending = 0, {}
    for worker in rng.integers(3, size=60):
        if worker in server.waiting:
            continue
        g = rng.standard_normal((8, 8))
        pending[worker] = g
        for to, frame in server.receive(worker, links[worker].push({"x": g})):
            links[to].receive(frame)
            if links[to].taken:
                total += pending[to]
            else:
                dropped += 1
    used = sum(g["x"] for g in server.optimizer.steps)
    used = used * (2 if rules.mode == "sync" else 1)  # means of two
    residuals = sum(link.states["x"]["residual"] for link in links)
    under_way = sum(pending[worker] for worker in server.waiting)
    # What is under way is in no residual yet.
    left = residuals.reshape(8, 8)
    assert np.abs(left).max() > 0.1
    np.testing.assert_allclose(total, used + left, atol=1e-9)
    assert (np.ndim(under_way) == 0) == (not server.waiting)
    assert dropped == server.stats.dropped.total()
    assert (dropped > 0) == (rules.mode == "sync")


# -- those who leave, NaN, damage ----------------------------------------------------------------


def test_the_step_goes_on_without_a_worker_that_leaves():
    sim = one_number(Rules(), workers=3)
    sim.run([0, 1])
    assert value(sim) == 1
    sim.leave(2)
    assert value(sim) == pytest.approx(0.9)
    sim.run([1, 0])
    assert value(sim) == pytest.approx(0.81)
    sim.leave(0)
    sim.leave(1)
    assert sim.server.is_over


@pytest.mark.parametrize("rules", [Rules(), Rules("async")])
def test_a_lost_worker_may_come_back(rules):
    sim = one_number(rules, workers=2)
    sim.run([0])
    sim.lose(1)
    assert not sim.is_waiting(0)
    sim.run([0, 0, 0])
    before = value(sim)
    sim.run([1])
    assert value(sim) == before, "what it had was old"
    stats = everything(sim)
    assert (stats.returned, stats.lost, stats.dropped) == ([1], [], {1: 1})
    assert sim.links[1].parameters["x"] == before
    sim.run([0, 1])
    assert value(sim) < before


def test_a_lost_worker_may_come_back_to_leave():
    sim = one_number(Rules(), workers=2)
    sim.lose(1)
    assert everything(sim).lost == [1]
    sim.leave(1)
    assert everything(sim).lost == []
    sim.run([0])
    assert value(sim) == pytest.approx(0.9)


def test_nan_of_all_workers_is_no_step():
    sim = one_number(Rules(), gradient=lambda worker, x, step: {"x": x["x"] * np.nan})
    sim.run([0, 1])
    assert value(sim) == 1
    assert everything(sim).updates == 0
    assert not sim.is_waiting(0)


def test_damage_is_noticed_everywhere():
    rules = Rules(compression="topk:density=0.5")
    x = {"x": np.arange(8.0)}
    frame = Link(x, 0, rules).push(x)
    for i in range(frame.size):
        damaged = frame.copy()
        damaged[i] ^= 4
        with pytest.raises(PayloadError, match="worker 0"):
            Server(x, SGD(), [0], rules).receive(0, damaged)
    for size in (0, 10, 24, frame.size - 8):
        with pytest.raises(PayloadError, match="worker 0"):
            Server(x, SGD(), [0], rules).receive(0, frame[:size])
    assert Server(x, SGD(), [0], rules).receive(0, frame)


def test_other_models_are_noticed():
    x = {"x": np.arange(8.0)}
    frame = Link(x, 0, Rules()).push(x)
    larger = {"x": np.arange(9.0)}
    with pytest.raises(PayloadError, match="8 entries where 9 were expected"):
        Server(larger, SGD(), [0], Rules()).receive(0, frame)
    more = {**x, "y": np.ones(2)}
    with pytest.raises(PayloadError, match="1 parts of 2"):
        Server(more, SGD(), [0], Rules()).receive(0, frame)


def test_the_end_has_the_last_parameters_and_statistics():
    rules = Rules("async")
    server = Server({"x": np.ones(2)}, SGD(0.5), [0], rules)
    link = Link(server.parameters, 0, rules)
    for _, frame in server.receive(0, link.push({"x": np.ones(2)})):
        link.receive(frame)
    assert server.receive(0, link.leave(failed=True)) == []
    assert server.is_over
    assert link.receive(server.end())
    assert link.is_over
    assert link.stats.failed == [0]
    assert link.stats.staleness == {0: 1}
    np.testing.assert_array_equal(link.parameters["x"], [0.5, 0.5])


# -- optimizers and options ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (SGD(0.1), ("SGD", {"lr": 0.1})),
        (
            SGD(0.1, 0.9, True, 0.01),
            ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        ),
    ],
)
def test_optimizers_are_those_of_torch(ours, theirs):
    import torch

    name, options = theirs
    rng = np.random.default_rng(0)
    x = {"x": rng.standard_normal(20)}
    p = torch.nn.Parameter(torch.tensor(x["x"]))
    optimizer = getattr(torch.optim, name)([p], **options)
    stepping = ArrayOptimizer(ours)
    for _ in range(5):
        g = rng.standard_normal(20)
        p.grad = torch.tensor(g)
        optimizer.step()
        stepping.step(x, {"x": g}, [])
    np.testing.assert_allclose(x["x"], p.detach().numpy(), rtol=1e-10)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "async", "backup": 1}, "backup=1 needs mode='sync'"),
        ({"compression": "onebit_adam"}, "OneBitAdam"),
    ],
)
def test_options_that_cannot_be(options, words):
    with pytest.raises(ConfigError, match=words):
        Rules(**options)
