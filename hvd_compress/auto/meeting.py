"""Exchanges between steps in which ranks tell each other texts, and the time that sums take."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from hvd_compress.advisor import Network
from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Exchange, Outcome
from hvd_compress.engines.joining import Member
from hvd_compress.reduce.reducer import Reducer
from hvd_compress.requests import Gather, Sum
from hvd_compress.stats import Record
from hvd_compress.wire.content import decode_bytes, encode_bytes

#: elements of the sums that are timed: the first one, the largest, and when one is long enough
_FIRST, _LARGEST, _ENOUGH = 2**16, 2**22, 0.05
_TIMES = 3


def told(reducer: Reducer, own: Any, like: Array) -> list[Any]:
    """Return what each rank tells, in the order of the ranks.  This is a collective.

    Args:
        own: what this rank tells, of which JSON is made.
        like: a gradient.
    """
    like = reducer.store.for_messages(like)
    return _run(reducer, "told", _texts(own, like), like).mean


def _texts(own: Any, like: Array) -> Exchange:
    xp, what = backend_of(like), "figures for compression='auto'"
    payload = xp.from_numpy(encode_bytes(json.dumps(own).encode(), what), like)
    frames = yield Gather(payload)
    texts = [
        decode_bytes(xp.to_numpy(frame), what, sender=f"rank {rank}").tobytes()
        for rank, frame in enumerate(frames)
    ]
    return Outcome(list(map(json.loads, texts)), payload, {})


def measured_network(reducer: Reducer, like: Array, now: Callable[[], float]) -> Network:
    """Return the network as sums of its own find it, equal on all ranks: of each the shortest time,
    and of the ranks the one that took longest.  This is a collective.

    Args:
        like: a gradient, in whose memory sums are made.
        now: a clock, which may go differently on each rank.
    """
    hosts = len(set(told(reducer, socket.gethostname(), like)))

    def seconds(n: int) -> float:
        found = []
        for _ in range(_TIMES):
            _sum(reducer, 1, like)  # all are there
            began = now()
            _sum(reducer, n, like)
            found.append(now() - began)
        return longest(told(reducer, min(found), like))

    short, n = seconds(1), _FIRST
    while (long := seconds(n)) < _ENOUGH and n < _LARGEST:
        n *= 4
    return Network.fitted(reducer.engine.size, hosts, short, long, 4 * n)


def longest(seconds: Iterable[Any]) -> float:
    """Return the longest of the times that ranks have told, where clocks may be wrong."""
    return max((s for s in seconds if math.isfinite(s)), default=0.0)


def _sum(reducer: Reducer, n: int, like: Array) -> None:
    xp = backend_of(like)
    zeros = xp.from_numpy(np.zeros(n, np.float32), like)

    def exchange() -> Exchange:
        total = yield Sum(zeros)
        return Outcome(total, zeros, {})

    total = _run(reducer, "sum", exchange(), like).mean
    xp.to_numpy(total[:1])  # where arrays are a device's, it is there only now


def _run(reducer: Reducer, name: str, exchange: Exchange, like: Array) -> Any:
    label = f"auto.{name}"
    return reducer.run([Member(label, exchange, Record(), 1)], like)[label]
