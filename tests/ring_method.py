"""An average that needs neighbours and a broadcast only, for tests of these requests."""

from __future__ import annotations

import dataclasses

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Outcome
from hvd_compress.requests import Broadcast, Neighbors
from tests.stateless import Stateless


@dataclasses.dataclass(frozen=True)
class Ring(Stateless, name="test-ring"):
    """Gradients go around a ring; each goes to the next two ranks besides.  The mean of the rank in
    the middle replaces all others.  Unless sizes are ``equal``, a rank's message has as many more
    bytes as its number."""

    equal: bool = True

    def exchange(self, gradient, state, context):
        xp, rank, size = backend_of(gradient), context.rank, context.size
        xp.check_gradient(gradient)
        x = xp.widen(gradient)
        n, dtype = xp.size(x), xp.dtype(x)
        nbytes = n * np.dtype(dtype).itemsize

        def encode(own):
            return [np.concatenate([own.view(np.uint8), np.zeros(self._more(rank), np.uint8)])]

        def decode(payload, owner):
            def step(received):
                assert received.size == nbytes + self._more(owner)
                return [received[:nbytes].view(dtype).copy()]

            return xp.on_host(step, [payload], [(dtype, n)], x)[0]

        (own,) = xp.on_host(encode, [x], [("uint8", nbytes + self._more(rank))], x)
        held, pieces = own, {rank: x}
        for hop in range(1, size):
            (held,) = yield self._request(held, (1,), context)
            pieces[(rank - hop) % size] = decode(held, (rank - hop) % size)
        if size > 2:
            for hop, payload in enumerate((yield self._request(own, (1, 2), context)), 1):
                pieces[(rank - hop) % size] = decode(payload, (rank - hop) % size)
        mean = sum(pieces[owner] for owner in range(size)) / size
        root = size // 2
        mean = yield Broadcast(mean if rank == root else mean * 0, root)
        return Outcome(xp.restore(mean, gradient), x, {})

    def _more(self, rank):
        return 0 if self.equal else rank + 1

    def _request(self, payload, hops, context):
        targets = tuple((context.rank + hop) % context.size for hop in hops)
        sources = tuple((context.rank - hop) % context.size for hop in hops)
        return Neighbors(payload, targets, sources, self.equal)
