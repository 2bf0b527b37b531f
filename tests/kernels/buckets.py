"""Exchanges of whole buckets, and the same by blocks, tensor after tensor."""

from __future__ import annotations

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
        self.states = None
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
        if self.states is None:
            self.states = [{n: self.method.init(g) for n, g in own.items()} for own in gradients]
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


def assert_equal(own, expected):
    np.testing.assert_array_equal(np.asarray(own.direction), np.asarray(expected.direction))
    assert own.direction.shape == expected.direction.shape
    for key in expected.state:
        np.testing.assert_array_equal(np.asarray(own.state[key]), np.asarray(expected.state[key]))
    assert own.state.keys() == expected.state.keys()
