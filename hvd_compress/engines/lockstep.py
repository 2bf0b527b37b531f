"""An engine that runs all ranks in one process: the simplest one, for tests, studies and examples.

All ranks advance together, one request at a time, so there is no concurrency and no time-out, and
hundreds of ranks fit into one test.  It works on the arrays of every backend.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import (
    Alltoall,
    Array,
    Batch,
    Broadcast,
    Compressor,
    Context,
    Gather,
    Max,
    Neighbors,
    Outcome,
    Sparse,
    SparseSum,
    SparseTotal,
    State,
)
from hvd_compress.engines.base import alone
from hvd_compress.engines.joining import Member, answers, joined
from hvd_compress.errors import CompressionError
from hvd_compress.stats import Record


def reply_to(requests: Sequence[Any], rank: int = 0) -> Any:
    """Return a rank's reply to its request, given all ranks' requests in rank order."""
    kinds = {type(request) for request in requests}
    if len(kinds) > 1:
        raise CompressionError(f"ranks ask for different things at once: {requests}")
    first = requests[0]
    if isinstance(first, Batch):
        return answers([requests[rank]])[0]
    if isinstance(first, Neighbors):
        return _from_neighbors(requests, rank)
    if isinstance(first, Alltoall):
        mine = [request.payloads[rank] for request in requests]
        if first.equal_sizes:  # sizes that are open may be symbols of a graph
            sizes = {backend_of(payload).size(payload) for payload in mine}
            if len(sizes) > 1:
                raise CompressionError(f"payloads for rank {rank} differ in size: {sorted(sizes)}")
        return mine
    if isinstance(first, Gather):
        return [request.payload for request in requests]
    if isinstance(first, SparseSum):
        return _sparse_total(requests)
    xp = backend_of(first.array)
    looks = {
        (xp.shape(request.array), xp.dtype(request.array), getattr(request, "wire", None))
        for request in requests
    }
    if len(looks) > 1:
        raise CompressionError(
            f"the ranks' arrays differ in (shape, dtype, wire): {sorted(looks, key=str)}"
        )
    if isinstance(first, Broadcast):
        return _from_root(requests)
    if isinstance(first, Max):
        result = first.array
        for request in requests[1:]:
            result = xp.maximum(result, request.array)
        return result
    if first.wire is None:
        result = first.array
        with np.errstate(invalid="ignore"):  # Inf of one rank and -Inf of another
            for request in requests[1:]:
                result = result + request.array
        return result
    # Like a good allreduce: the wire type between ranks, float32 for adding.
    dtype = xp.dtype(first.array)
    parts = [xp.cast(xp.round_to(request.array, first.wire), "float32") for request in requests]
    result = parts[0]
    with np.errstate(invalid="ignore"):  # Inf of one rank and -Inf of another
        for part in parts[1:]:
            result = result + part
    return xp.cast(xp.round_to(result, first.wire), dtype)


def _sparse_total(requests: Sequence[SparseSum]) -> SparseTotal:
    """Return the sum of sparse vectors, added in the order of the ranks."""
    if len({(request.n, request.wire, request.algorithm) for request in requests}) > 1:
        raise CompressionError(f"ranks ask for sparse sums that differ: {requests}")
    like = requests[0].sparse
    xp = backend_of(like.values)
    total = xp.zeros(requests[0].n, like.values)
    for indices, values in (request.sparse for request in requests):
        total = xp.add_at(total, indices, xp.round_to(values, requests[0].wire))
    return SparseTotal(total, Sparse(like.indices[:0], like.values[:0]))


def _from_neighbors(requests: Sequence[Neighbors], rank: int) -> list[Array]:
    own = requests[rank]
    for target in own.targets:
        if target == rank or rank not in requests[target].sources:
            raise CompressionError(f"rank {rank} sends to rank {target}, which does not receive it")
    for source in own.sources:
        if rank not in requests[source].targets:
            raise CompressionError(
                f"rank {rank} waits for rank {source}, which sends to {requests[source].targets}"
            )
        sizes = [backend_of(x.payload).size(x.payload) for x in (own, requests[source])]
        if own.equal_sizes and len(set(sizes)) > 1:
            raise CompressionError(
                f"rank {rank} has {sizes[0]} bytes for its neighbours, and rank {source} {sizes[1]}"
            )
    return [requests[source].payload for source in own.sources]


def _from_root(requests: Sequence[Broadcast]) -> Array:
    roots = {request.root for request in requests}
    if len(roots) > 1 or not roots <= set(range(len(requests))):
        raise CompressionError(f"the roots of {len(requests)} ranks are {sorted(roots)}")
    return requests[roots.pop()].array


def run(exchanges: Sequence[Any]) -> list[Any]:
    """Run one exchange per rank to the end, and return the outcomes in rank order."""
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
        common = (
            None if isinstance(requests[0], Alltoall | Neighbors | Batch) else reply_to(requests)
        )
        replies = [
            reply_to(requests, rank) if common is None else common for rank in range(len(requests))
        ]


class World:
    """Ranks in one process, which hold one state each for every tensor name.

    Methods run by their blocks, which are their definition; with ``fused=True`` whole buckets run
    in one pass where they can, which is faster and gives the same bits.

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
        self._scratch: dict[tuple[str, int], dict[str, Any]] | None = {} if fused else None

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
        for name, gradient in gradients[0].items():
            if name not in self.states:
                shape = backend_of(gradient).shape(gradient)
                method = self.compressor.for_tensor(name, shape)
                self.states[name] = [method.init(own[name]) for own in gradients]
        outcomes = run([self._joined(rank, own, context) for rank, own in enumerate(gradients)])
        for name in gradients[0]:
            self.states[name] = [outcome[name].state for outcome in outcomes]
            self.steps[name] = self.steps.get(name, 0) + 1
        return outcomes

    def _joined(self, rank: int, gradients: Mapping[str, Array], context: dict[str, Any]) -> Any:
        """A rank's exchange of all tensors."""
        members = []
        if self.compressor.needs_gradient_norm:
            norms = [float(backend_of(g).norm(g)) for g in gradients.values()]
            context = {"gradient_norm": math.hypot(*norms), **context}
        for name, gradient in gradients.items():
            method = self.compressor.for_tensor(name, backend_of(gradient).shape(gradient))
            step, state = self.steps.get(name, 0), self.states[name][rank]
            common = Context(name, rank, self.size, step, self.epoch, self.seed)
            if self._scratch is not None:
                common = common._replace(scratch=self._scratch.setdefault((name, rank), {}))
            exchange = method.exchange(gradient, state, common._replace(**context))
            members.append(Member(name, exchange, self.record if rank == 0 else Record()))
        return joined(members, rank, self.size)
