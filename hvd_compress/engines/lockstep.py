"""An engine that runs all ranks in one process: the simplest one, for tests, studies and examples.

All ranks advance together, one request at a time, so there is no concurrency and no time-out, and
hundreds of ranks fit into one test.  It works on the arrays of every backend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Compressor, Context, Outcome, Plan, State
from hvd_compress.engines.joining import (
    Entry,
    PlacedTensor,
    TensorExchange,
    alone,
    exchanged,
    groups_of,
    joined,
    plan_for,
    tensors_of,
)
from hvd_compress.errors import CompressionError
from hvd_compress.stats import Record


def reply_to(requests: Sequence[Any], rank: int = 0) -> Any:
    """Return a rank's reply to its request, given all ranks' requests in rank order."""
    if len({type(request) for request in requests}) > 1:
        raise CompressionError(f"ranks ask for different things at once: {requests}")
    return requests[0].reply(requests, rank)


def replies_to(requests: Sequence[Any]) -> list[Any]:
    """Return all ranks' replies to their requests, both in rank order."""
    if requests[0].is_common:
        return [reply_to(requests)] * len(requests)
    return [reply_to(requests, rank) for rank in range(len(requests))]


def run(
    exchanges: Sequence[Any], answers: Callable[[Sequence[Any]], list[Any]] = replies_to
) -> list[Any]:
    """Run one exchange per rank to the end, and return the outcomes in rank order.

    Args:
        answers: returns all ranks' replies, for exchanges that yield more kinds of requests.
    """
    outcomes: list[Any] = []
    replies: list[Any] = [None] * len(exchanges)
    exchanges = [alone(exchange) for exchange in exchanges]
    while True:
        requests = []
        for exchange, reply in zip(exchanges, replies, strict=True):
            try:
                requests.append(exchange.send(reply))
            except StopIteration as stop:
                outcomes.append(stop.value)
        if not requests:
            return outcomes
        if outcomes:
            raise CompressionError("some ranks are done while others still want to exchange")
        if len({type(request) for request in requests}) > 1:
            raise CompressionError(f"ranks ask for different things at once: {requests}")
        replies = answers(requests)


class World:
    """Ranks in one process, which hold one state each for every tensor name.

    Methods run by their blocks, which are their definition.  With ``fused=True`` whole buckets run
    in one pass where they can, which is faster and gives the same bits.  Their outcomes have the
    direction of the step as ``mean``, and ``None`` as ``sent``.

    Example:
        >>> import numpy as np
        >>> from hvd_compress import TopK
        >>> world = World(TopK(density=0.5), size=2)
        >>> world.exchange([np.array([3.0, 1.0]), np.array([1.0, 2.0])])[0].mean
        array([1.5, 1. ])
    """

    def __init__(
        self, compressor: Compressor, size: int, seed: int = 0, fused: bool = False
    ) -> None:
        self.compressor = compressor
        self.size = size
        self.seed = seed
        self.epoch: int | None = None
        self.record = Record()  # of all that rank 0 sent and received
        self.states: dict[str, list[State]] = {}
        self.steps: dict[str, int] = {}
        self._plans: dict[tuple[Any, ...], Plan] | None = {} if fused else None

    def exchange(
        self, gradients: Sequence[Array], name: str = "tensor", **context: Any
    ) -> list[Outcome]:
        """Average one tensor.  ``gradients`` are in rank order; ``context`` has fields of
        ``base.Context``."""
        return [o[name] for o in self.exchange_all([{name: g} for g in gradients], **context)]

    def exchange_all(
        self, gradients: Sequence[Mapping[str, Array]], **context: Any
    ) -> list[dict[str, Outcome]]:
        """Average several tensors in one bucket.  ``gradients`` are by name, in rank order, as are
        the outcomes; ``context`` has fields of ``base.Context``."""
        if len(gradients) != self.size:
            raise CompressionError(f"{len(gradients)} gradients for {self.size} ranks")
        for name in gradients[0]:
            if name not in self.states:
                self.begin(name, [own[name] for own in gradients])
        outcomes = run([self._joined(rank, own, context) for rank, own in enumerate(gradients)])
        for name in gradients[0]:
            self.states[name] = [outcome[name].state for outcome in outcomes]
            self.steps[name] = self.steps.get(name, 0) + 1
        return outcomes

    def begin(self, name: str, gradients: Sequence[Array]) -> None:
        """Give a tensor the states that it begins with."""
        shape = backend_of(gradients[0]).shape(gradients[0])
        method = self.compressor.for_tensor(name, shape)
        self.states[name] = [method.init(gradient) for gradient in gradients]

    def _joined(self, rank: int, gradients: Mapping[str, Array], context: dict[str, Any]) -> Any:
        entries: list[Entry] = []
        steps = {self.steps.get(name, 0) for name in gradients}
        common = Context("", rank, self.size, 0, self.epoch, self.seed)._replace(**context)
        if self.compressor.needs_gradient_norm and "gradient_norm" not in context:
            norms = [float(backend_of(g).norm(g)) for g in gradients.values()]
            common = common._replace(gradient_norm=math.hypot(*norms))
        for name, gradient in gradients.items():
            method = self.compressor.for_tensor(name, backend_of(gradient).shape(gradient))
            step, state = self.steps.get(name, 0), self.states[name][rank]
            common = common._replace(name=name, step=context.get("step", step))
            is_one = self._plans is not None and len(steps) == 1  # a plan is in one step
            place = method.place(gradient, common) if is_one else None
            if place is not None:
                entries.append(PlacedTensor(name, gradient, state, place, common.momentum))
                continue
            exchange = method.exchange(gradient, state, common)
            entries.append(TensorExchange(name, exchange, self.record if rank == 0 else Record()))
        return self._exchanged(entries, common)

    def _exchanged(self, entries: list[Entry], step: Context) -> Any:
        groups, members = groups_of(entries)
        outcomes: dict[str, Outcome] = yield from joined(members, step.rank, step.size)
        for group in groups:
            assert self._plans is not None
            key = step.rank, *(each.name for each in group)
            plan = self._plans[key] = plan_for(group, step, self._plans.get(key))
            record = self.record if step.rank == 0 else Record()
            found = yield from exchanged(plan, tensors_of(group), step, record)
            for i, (name, x) in enumerate(zip(plan.names, found.directions, strict=True)):
                outcomes[name] = Outcome(x, None, found.states[i], additive=plan.additive)
        return outcomes
