"""Exchanges of whole buckets, and the same by blocks, tensor after tensor."""

from __future__ import annotations

import copy

import numpy as np

from hvd_compress import Context
from hvd_compress.base import Outcome
from hvd_compress.engines.joining import PlacedTensor, exchanged, groups_of, plan_for, tensors_of
from hvd_compress.engines.lockstep import World, replies_to, run
from hvd_compress.stats import Record


class Ranks:
    """Ranks that exchange a bucket at a time, by plans that they keep between steps."""

    def __init__(self, method, shapes, size, *, in_place=False):
        self.method, self.shapes, self.size = method, shapes, size
        self.in_place, self.scratch = in_place, [{} for _ in range(size)]
        self.reads_device = False
        self.states = [None] * size
        self.plans = [{} for _ in range(size)]
        self.step = 0

    def context(self, rank):
        return Context(
            rank=rank,
            size=self.size,
            step=self.step,
            momentum=0.9,
            gradient_norm=3.0,
            in_place=self.in_place,
            reads_device=self.reads_device,
            scratch=self.scratch[rank],
        )

    def begun(self, rank, gradients):
        """The exchange of one rank."""
        if self.states[rank] is None:
            self.states[rank] = {name: self.method.init(x) for name, x in gradients.items()}
        step, entries = self.context(rank), []
        for name, gradient in gradients.items():
            place = self.method.place(gradient, step._replace(name=name))
            assert place is not None, name
            state = self.states[rank][name]
            entries.append(PlacedTensor(name, gradient, state, place, step.momentum))
        return self._exchange(entries, self.plans[rank], step)

    def _exchange(self, entries, plans, step):
        found = []
        for group in groups_of(entries)[0]:
            names = tuple(each.name for each in group)
            plans[names] = plan_for(group, step, plans.get(names))
            done = yield from exchanged(plans[names], tensors_of(group), step, Record())
            found.append((names, done))
        return found

    def exchange(self, gradients, answers=replies_to):
        """Outcomes by rank and name, of ``gradients[rank][name]``: the direction of the step is the
        ``mean``, and what was sent is not known."""
        outcomes = []
        exchanges = [self.begun(rank, own) for rank, own in enumerate(gradients)]
        for buckets in run(exchanges, answers):
            own = {}
            for names, found in buckets:
                for i, name in enumerate(names):
                    own[name] = Outcome(found.directions[i], None, found.states[i])
            outcomes.append(own)
        self.states = [{n: o.state for n, o in own.items()} for own in outcomes]
        self.step += 1
        return outcomes


def gradients_of(random, shapes, ranks):
    """Normal numbers, by rank and name."""
    return [
        {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        for _ in range(ranks)
    ]


def one_by_one(method, size):
    """The same by blocks, tensor after tensor."""
    world = World(method, size)

    def exchange(gradients):
        found = [{} for _ in gradients]
        for name in gradients[0]:
            outcomes = world.exchange(
                [own[name] for own in gradients], name, momentum=0.9, gradient_norm=3.0
            )
            for own, outcome in zip(found, outcomes, strict=True):
                own[name] = outcome
        return found

    return exchange


def two_of_three(method, shapes, random, make, **options):
    """Ranks that go on from a training of three, with arrays by ``make``; and the same by blocks,
    in NumPy."""
    ranks, world = Ranks(method, shapes, 3), World(method, 3)
    for _ in range(2):
        gradients = gradients_of(random, shapes, 3)
        world.exchange_all(gradients, momentum=0.9)
        ranks.exchange(made(gradients, make))
    fewer, blocks = Ranks(method, shapes, 2, **options), World(method, 2)
    fewer.states, fewer.step = copy.deepcopy(ranks.states[:2]), 2
    blocks.states = {name: copy.deepcopy(states[:2]) for name, states in world.states.items()}
    blocks.steps = dict.fromkeys(shapes, 2)
    return fewer, blocks


def made(gradients, make):
    """The same as arrays of a framework."""
    return [{name: make(x) for name, x in own.items()} for own in gradients]


def assert_all_equal(found, expected):
    """Outcomes by rank and name."""
    for own, others in zip(found, expected, strict=True):
        for name, other in others.items():
            assert_equal(own[name], other)


def assert_equal(own, expected):
    np.testing.assert_array_equal(np.asarray(own.direction), np.asarray(expected.direction))
    assert own.direction.shape == expected.direction.shape
    for key in expected.state:
        np.testing.assert_array_equal(np.asarray(own.state[key]), np.asarray(expected.state[key]))
    assert own.state.keys() == expected.state.keys()
