"""Exchanges of whole buckets, and the same by blocks, tensor after tensor."""

from __future__ import annotations

import numpy as np

from hvd_compress import Context, Sparse
from hvd_compress.engines.joining import Member, joined
from hvd_compress.engines.lockstep import World, run
from hvd_compress.requests import Joint
from hvd_compress.stats import Record


class Ranks:
    """Ranks that exchange a bucket at a time, and keep memory between steps."""

    def __init__(self, method, shapes, size, *, in_place=False):
        self.method, self.shapes, self.size = method, shapes, size
        self.in_place, self.needs_sent = in_place, True
        self.states = None
        self.scratch = [{name: {} for name in shapes} for _ in range(size)]
        self.step = 0

    def exchange(self, gradients):
        """Outcomes by rank and name, of ``gradients[rank][name]``."""
        if self.states is None:
            self.states = [{n: self.method.init(g) for n, g in own.items()} for own in gradients]
        buckets = []
        for rank, own in enumerate(gradients):
            members = []
            for name, gradient in own.items():
                context = Context(
                    name=name,
                    rank=rank,
                    size=self.size,
                    step=self.step,
                    momentum=0.9,
                    gradient_norm=3.0,
                    scratch=self.scratch[rank][name],
                    in_place=self.in_place,
                    needs_sent=self.needs_sent,
                )
                exchange = self.method.exchange(gradient, self.states[rank][name], context)
                members.append(Member(name, exchange, Record()))
            assert {member.look.kind[0] for member in members} == {Joint}
            buckets.append(joined(members, rank, self.size))
        outcomes = run(buckets)
        for rank, own in enumerate(outcomes):
            for name, outcome in own.items():
                self.states[rank][name] = outcome.state
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
    np.testing.assert_array_equal(np.asarray(own.mean), np.asarray(expected.mean))
    assert own.mean.shape == expected.mean.shape
    for key in expected.state:
        np.testing.assert_array_equal(np.asarray(own.state[key]), np.asarray(expected.state[key]))
    assert own.state.keys() == expected.state.keys()
    if expected.update is not None:
        np.testing.assert_array_equal(np.asarray(own.update), np.asarray(expected.update))
        assert own.update.shape == expected.update.shape
    assert type(own.sent) is type(expected.sent)
    sent = [(o.sent if isinstance(o.sent, Sparse) else [o.sent]) for o in (own, expected)]
    for part, other in zip(*sent, strict=True):
        np.testing.assert_array_equal(np.asarray(part), np.asarray(other))
