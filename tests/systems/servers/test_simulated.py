"""The parameter server in one process, by hand-computed numbers and laws."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from hvd_compress import as_compressor, method_names
from hvd_compress.base import Context, Sparse
from hvd_compress.engines import lockstep
from hvd_compress.errors import ConfigError, PayloadError
from hvd_compress.methods import NoCompression
from hvd_compress.systems.servers import (
    SGD,
    Adam,
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


OPTIMIZERS = (
    SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    Adam(lr=0.1, weight_decay=0.1),
)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["sgd", "adam"])
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


def test_marks_of_another_model_are_noticed():
    rules = Rules()
    start = {name: np.ones(2) for name in "abc"}
    server, link = Server(start, SGD(), [0], rules), Link({"a": np.ones(2)}, 0, rules)
    with pytest.raises(PayloadError, match="1 marks for"):
        server.receive(0, link.push({}))


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


def problem(workers, seed=0):
    rng = np.random.default_rng(seed)
    start = {
        "w": rng.standard_normal((40, 30)).astype(np.float32),
        "b": rng.standard_normal(30).astype(np.float32),
        "scale": np.float32(1.5) + np.zeros((), np.float32),
    }
    noise = {}

    def gradient(worker, x, step):
        if (worker, step) not in noise:
            own = np.random.default_rng([seed, worker, step])
            noise[worker, step] = {
                name: own.standard_normal(value.shape).astype(np.float32)
                for name, value in start.items()
            }
        return {name: x[name] + noise[worker, step][name] for name in x}

    return start, gradient


def test_synchronous_is_the_dense_average_bit_for_bit():
    start, gradient = problem(4)
    sim = Simulation(start, gradient, 4, Rules(), SGD(0.1, 0.9))
    x, world, velocity = start, lockstep.World(NoCompression(), 4), {}
    for step in range(4):
        sim.run([(step + i) % 4 for i in range(4)])  # in whatever order
        gradients = [gradient(worker, x, step) for worker in range(4)]
        means = {k: o.mean for k, o in world.exchange_all(gradients)[0].items()}
        velocity = {k: 0.9 * velocity[k] + g if velocity else g for k, g in means.items()}
        x = {k: x[k] - 0.1 * velocity[k] for k in x}
        for name in x:
            np.testing.assert_array_equal(sim.parameters[name], x[name])
            assert x[name].dtype == np.float32
        for worker in range(4):
            for name in x:
                np.testing.assert_array_equal(sim.links[worker].parameters[name], x[name])


def sendable(name):
    try:
        rules = Rules(compression=name)
        x = {"w": np.ones((4, 5), np.float32)}
        Link(x, 0, rules).push(x, epoch=0)
    except ConfigError:
        return False
    return True


ALL = (*method_names(), "dgc:small=sparse", "efsignsgd:via=allgather", "signsgd:via=allgather")
SENDABLE = [name for name in ALL if not name.startswith("test-") and sendable(name)]


def test_most_methods_can_be_sent():
    wanted = {"none", "fp16", "bf16", "topk", "randomk", "powersgd", "natural", "scalecom"}
    assert wanted <= set(SENDABLE)
    assert not {"ef21", "oktopk", "onebit_adam"} & set(SENDABLE)
    x = {"w": np.ones(20)}
    link = Link(x, 0, Rules(compression="ef21"))
    with pytest.raises(ConfigError, match="compression='ef21' cannot be sent to a server"):
        link.push(x)


@pytest.mark.parametrize("name", SENDABLE)
def test_a_server_reads_what_the_worker_sent(name):
    rules, momentum = Rules(compression=name), 0.9 if as_compressor(name).takes_momentum else 0.0
    coder = LinkCoder(rules, 1, seed=3, momentum=momentum)
    rng, states = np.random.default_rng(0), {}
    shapes = {"w": np.zeros((60, 50), np.float32), "b": np.zeros(7), "none": np.zeros(0)}
    for step in range(3):
        x = {k: rng.standard_normal(v.shape).astype(v.dtype) for k, v in shapes.items()}
        before = copy.deepcopy(states)
        parts, states = coder.encode(x, states, step, epoch=float(step))
        found = coder.decode(iter(parts), shapes, step, float(step), "worker 0")
        assert not found["none"].size
        for key in ("w", "b"):
            assert found[key].dtype == x[key].dtype
            context = Context(
                key, step=step, epoch=float(step), seed=3 * 2**20 + 1, momentum=momentum
            )
            if rules.compression.needs_gradient_norm:
                norm = np.sqrt(sum(float(np.sum(np.square(g, dtype=float))) for g in x.values()))
                context = context._replace(gradient_norm=norm)
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


def test_bytes_are_those_of_the_messages():
    x = {"x": np.zeros(1000, np.float32)}
    sim = Simulation(x, lambda w, x, s: {"x": x["x"] + 1}, 2, Rules(), SGD())
    sim.run([0, 1, 1, 0])
    # Header and number, the sizes of the parts, 4000 bytes; up the epoch, and a frame of their own.
    assert everything(sim).bytes_down == 4 * (16 + 8 + 8 + 4000)
    assert everything(sim).bytes_up == 4 * (16 + 8 + 8 * 2 + 8 + 16 + 4000)
    assert sim.links[0].bytes_sent * 2 == everything(sim).bytes_up


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


@pytest.mark.parametrize("rules", [Rules(), Rules("async")])
@pytest.mark.parametrize("compression", ["none", "topk:density=0.5"])
def test_nan_is_not_used_and_counted(rules, compression):
    import dataclasses

    def gradient(worker, x, step):
        return {"x": x["x"] * (np.nan if worker == 1 and step == 0 else 1)}

    rules = dataclasses.replace(rules, compression=compression)
    sim = one_number(rules, gradient=gradient)
    sim.run([1, 0])
    assert value(sim) == pytest.approx(0.9)
    assert everything(sim).non_finite == 1
    assert not sim.links[1].taken
    sim.run([1, 0])
    assert np.isfinite(value(sim))
    assert value(sim) < 0.9
    assert sim.links[1].taken


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


def test_other_options_are_noticed():
    x = {"x": np.arange(8.0)}
    frame = Link(x, 0, Rules()).push(x)
    with pytest.raises(PayloadError, match="other rules"):
        Server(x, SGD(), [0], Rules("async")).receive(0, frame)
    larger = {"x": np.arange(9.0)}
    with pytest.raises(PayloadError, match="8 entries where 9 were expected"):
        Server(larger, SGD(), [0], Rules()).receive(0, frame)
    more = {**x, "y": np.ones(2)}
    with pytest.raises(PayloadError, match="a part is missing"):
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
        (Adam(0.01, weight_decay=0.1), ("Adam", {"lr": 0.01, "weight_decay": 0.1})),
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
        ({"mode": "synchronous"}, "mode must be one of"),
        ({"backup": -1}, "backup must be"),
        ({"mode": "async", "backup": 1}, "backup=1 needs mode='sync'"),
        ({"compression": "onebit_adam"}, "OneBitAdam"),
    ],
)
def test_options_that_cannot_be(options, words):
    with pytest.raises(ConfigError, match=words):
        Rules(**options)


def test_options_of_adam_are_checked():
    for betas in ((0.9, 1.0), (0.9,), (-0.1, 0.9), ("a", 0.9)):
        with pytest.raises(ConfigError, match="betas must be two numbers"):
            Adam(betas=betas)
    with pytest.raises(ConfigError, match="eps must be 0 or more"):
        Adam(eps=-1.0)
