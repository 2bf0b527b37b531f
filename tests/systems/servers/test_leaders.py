"""Asynchronous Leader SGD and elastic averaging, by hand and in one process."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_compress.errors import PayloadError
from hvd_compress.systems.rounds import LeaderSGD
from hvd_compress.systems.servers.leaders import LeaderLink, LeaderServer

#: of Leader SGD with one leader
ONE = {"local_pull": 0, "local_drift": 0}


def one(every, pull=0.1, drift=0.1):
    return {"local_every": every, "global_every": every, "global_pull": pull} | {
        "global_drift": drift,
        **ONE,
    }


class Workers:
    """Each minimises f with its own steps; who steps when is up to the caller."""

    def __init__(self, starts, lr=0.1, gradient=lambda x: x, f=lambda x: x * x / 2, **options):
        rules = LeaderSGD(**options)
        self.x = [np.array([float(start)]) for start in starts]
        self.server = LeaderServer({"x": np.zeros(1)}, range(len(starts)), rules)
        self.links = [LeaderLink({"x": np.zeros(1)}, rules) for _ in starts]
        self.lr, self.gradient, self.f = lr, gradient, f

    def step(self, worker):
        x, link = self.x[worker], self.links[worker]
        after = x - self.lr * self.gradient(x)
        frame = link.push({"x": after}, float(self.f(x[0])))
        for to, reply in self.server.receive(worker, frame):
            assert to == worker, "nobody waits for others"
            assert link.receive(reply)
        link.pull()
        self.x[worker] = link.parameters["x"]
        return float(self.x[worker][0])


def test_the_leader_is_chosen_by_the_mean_loss_and_nan_does_not_lead():
    workers = Workers([1, 2], **one(2), gradient=lambda x: 0 * x)
    losses = iter([np.nan, 5.0, 1.0, 6.0])
    workers.f = lambda x: next(losses)
    for worker in (0, 1, 0, 1):
        workers.step(worker)
    assert workers.server.leaders == [1]


def test_nan_on_a_worker_ends_with_the_next_leader():
    workers = Workers([2, 3], **one(2))
    workers.step(0)
    workers.x[1] = np.array([np.nan])
    for worker in (1, 0, 1, 0, 0):
        workers.step(worker)
    assert workers.server.leaders == [0]
    found = workers.step(1)
    assert workers.links[1].recovered
    assert found == float(workers.links[0].parameters["x"][0])
    workers.step(1)
    assert not workers.links[1].recovered


def test_no_leader_where_all_losses_are_nan():
    workers = Workers([1, 2], **one(1), f=lambda x: np.nan)
    for worker in (0, 1, 0, 1, 0):
        workers.step(worker)
    assert workers.server.leaders == []


def test_a_leader_that_goes_is_replaced_and_the_end_is_the_mean():
    workers = Workers([1, 2, 3], **one(1), gradient=lambda x: 0 * x)
    for worker in range(3):
        workers.step(worker)
    assert workers.server.leaders == [0]
    workers.server.lose(0)
    for worker in (1, 2):
        workers.step(worker)
    assert workers.server.leaders == [0, 1]
    for worker in (1, 2):
        workers.server.receive(worker, workers.links[worker].leave())
    assert workers.server.is_over
    link = workers.links[2]
    assert link.receive(workers.server.end())
    assert link.stats.lost == [0]
    assert link.parameters["x"] == pytest.approx([2.5])


@pytest.mark.parametrize(("bad", "mean"), [((2,), 1.5), ((0, 1, 2), np.nan)])
def test_who_ends_with_nan_is_not_in_the_mean(bad, mean):
    workers = Workers([1, 2, 3], **one(1), gradient=lambda x: 0 * x)
    for worker, link in enumerate(workers.links):
        link.push({"x": np.array([np.nan if worker in bad else workers.x[worker][0]])}, 1.0)
        workers.server.receive(worker, link.leave())
    assert workers.links[0].receive(workers.server.end())
    np.testing.assert_allclose(workers.links[0].parameters["x"], [mean])
    assert workers.links[0].stats.non_finite == len(bad)


def test_only_leaders_send_parameters():
    rules = LeaderSGD(**one(2))
    x = {"w": np.ones(1000)}
    server, link = LeaderServer(x, [0], rules), LeaderLink(x, rules)
    sizes = []
    for _ in range(5):
        frame = link.push(x, 1.0)
        sizes.append(frame.nbytes)
        for _, reply in server.receive(0, frame):
            link.receive(reply)
    assert sizes == [40, 40, 8048, 40, 8048]


def test_damage_is_noticed():
    rules, x = LeaderSGD(), {"w": np.ones(3)}
    frame = LeaderLink(x, rules).push(x, 1.0)
    frame[-1] ^= 1
    server = LeaderServer(x, [0], rules)
    with pytest.raises(PayloadError, match="worker 0: its checksum"):
        server.receive(0, frame)


# -- groups ------------------------------------------------------------------------------------


def reference(starts, order, losses, rules):
    """Asynchronous Leader SGD in one loop, without messages: f = x^2 / 2, rate 0.1."""
    n = len(starts)
    x, known = list(map(float, starts)), [{} for _ in starts]
    fresh, due = [{} for _ in starts], [set() for _ in starts]
    seen, count, choices, waits, told = [[] for _ in starts], 0, 0, set(), set()
    groups = [range(i, min(i + rules.groups, n)) for i in range(0, n, rules.groups)]
    every = {"group": rules.local_every, "all": rules.global_every}
    pull = {"group": rules.local_pull, "all": rules.global_pull}
    drift = {"group": rules.local_drift, "all": rules.global_drift}
    path = []
    for turn, w in enumerate(order):
        seen[w].append(losses[turn])
        x[w] = 0.9 * x[w]
        count += 1
        if w in told:  # it leads from here on
            waits.discard(w)
            told.discard(w)
            for role in due[w]:
                for other in range(n) if role == "all" else next(g for g in groups if w in g):
                    if other != w:
                        fresh[other][role] = x[w]
                known[w].pop(role, None)
                fresh[w].pop(role, None)
            due[w] = set()
        if not waits and count >= n * rules.local_every:
            count, choices = 0, choices + 1
            mean = {i: np.mean(s[-rules.loss_window :]) for i, s in enumerate(seen) if s}
            for group in groups:
                there = [i for i in group if i in mean]
                if there and len(group) > 1:
                    due[min(there, key=mean.get)].add("group")
            if choices % (rules.global_every // rules.local_every) == 0:
                due[min(mean, key=mean.get)].add("all")
            waits = {i for i in range(n) if due[i]}
        told |= waits & {w}
        known[w].update(fresh[w])
        change = 0.0
        for role in ("group", "all"):
            if role in known[w] and role not in due[w]:
                far = pull[role] if role in fresh[w] else drift[role] / every[role]
                change += far * (x[w] - known[w][role])
        x[w] -= change
        fresh[w] = {}
        path.append(x[w])
    return path


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("groups", [1, 2, 5])
def test_groups_follow_a_loop_without_messages(seed, groups):
    """Five workers of different speed, with noisy losses."""
    rng = np.random.default_rng(seed)
    starts = rng.normal(size=5)
    order = rng.choice(5, size=200, p=[0.4, 0.3, 0.15, 0.1, 0.05])
    losses = rng.normal(size=200)
    options = {"local_every": 2, "global_every": 6, "local_pull": 0.3, "global_pull": 0.2}
    options |= {"local_drift": 0.15, "global_drift": 0.25, "groups": groups}
    noise = iter(losses)
    workers = Workers(starts, f=lambda x: next(noise), **options)
    found = [workers.step(worker) for worker in order]
    assert found == pytest.approx(reference(starts, order, losses, LeaderSGD(**options)))
    assert len(workers.server.leaders) >= 3


def test_groups_are_those_of_the_nodes():
    rules, x = LeaderSGD(local_every=1), {"x": np.zeros(1)}
    server = LeaderServer(x, range(4), rules, nodes=((0, 2), (1, 3)))
    for worker in range(4):
        server.receive(worker, LeaderLink(x, rules).push(x, float(worker)))
    assert server.group_leaders == [[0, 1]]


def test_a_group_whose_leader_goes_gets_another_one():
    options = {"local_every": 1, "global_every": 1, "groups": 2}
    workers = Workers([4, 3, 2, 1], gradient=lambda x: 0 * x, f=lambda x: 5 - x, **options)
    for worker in range(4):
        workers.step(worker)
    assert workers.server.group_leaders == [[0, 2]]
    workers.server.lose(0)
    for worker in (1, 2, 3, 2):
        workers.step(worker)
    assert workers.server.group_leaders == [[0, 2], [1, 2]]
    assert workers.server.leaders == [0, 1]
