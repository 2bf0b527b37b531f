"""Exchanges between steps: ranks tell each other texts, and time sums of their own."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Iterable
from typing import Any

import numpy as np

from hvd_compress.advisor.network import Network
from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Exchange, Outcome
from hvd_compress.engines.joining import TensorExchange
from hvd_compress.reduce import Reducer
from hvd_compress.requests import Gather
from hvd_compress.stats import Record
from hvd_compress.wire.content import decode_bytes, encode_bytes

#: elements of the sums that are timed: the first one, the largest, and when one is long enough
_FIRST, _LARGEST, _ENOUGH = 2**16, 2**22, 0.05
_TIMES = 3


def told(reducer: Reducer, own: Any, like: Array) -> list[Any]:
    """Return what each rank tells, in the order of the ranks.  This is a collective.

    Args:
        own: plain values of this rank that JSON can hold.
        like: an array, such as a gradient.
    """
    texts = _texts(own, reducer.store.for_messages(like))
    return reducer.run([TensorExchange("told", texts, Record())], like)["told"].mean


def _texts(own: Any, like: Array) -> Exchange:
    xp, what = backend_of(like), "figures for compression='auto'"
    payload = xp.from_numpy(encode_bytes(json.dumps(own).encode(), what), like)
    frames = yield Gather(payload)
    texts = [
        decode_bytes(xp.to_numpy(frame), what, sender=f"rank {rank}").tobytes()
        for rank, frame in enumerate(frames)
    ]
    return Outcome(list(map(json.loads, texts)), payload, {})


def measured_network(reducer: Reducer, like: Array) -> Network:
    """Return the network as it carries sums, equal on all ranks.  Each sum counts with its shortest
    time on the slowest rank.  This is a collective.

    Args:
        reducer: sums are timed by its clock, which may go differently on each rank.
        like: an array, such as a gradient; sums are made where it is.
    """
    hosts = len(set(told(reducer, socket.gethostname(), like)))
    xp, now = backend_of(like), reducer.clock.now

    def seconds(n: int) -> float:
        zeros, found = xp.from_numpy(np.zeros(n, np.float32), like), []
        for _ in range(_TIMES):
            reducer.average({"sum": zeros[:1]})  # all are there
            began = now()
            mean = reducer.average({"sum": zeros})["sum"]
            xp.to_numpy(mean[:1])  # arrays of a device are there only now
            found.append(now() - began)
        return longest(told(reducer, min(found), like))

    short, n = seconds(1), _FIRST
    while (long := seconds(n)) < _ENOUGH and n < _LARGEST:
        n *= 4
    return Network.fitted(reducer.engine.size, hosts, short, long, 4 * n)


def longest(seconds: Iterable[Any]) -> float:
    """Return the longest of the times that ranks have told, where clocks may be wrong."""
    return max((s for s in seconds if math.isfinite(s)), default=0.0)
