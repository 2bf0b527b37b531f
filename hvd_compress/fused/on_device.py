"""Messages that are made in a device's memory, and read there.

Nobody waits if engines read that memory.  Others get copies with headers, by which damage is
noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context
from hvd_compress.requests import Alltoall, Collective, Gather, Request

#: writes the header of a message; and raises an error if that of a rank, given its number, is not
#: what was expected
Seal: TypeAlias = Callable[[np.ndarray], Any]
Check: TypeAlias = Callable[[np.ndarray, int], Any]


def gathered(
    message: Array, seal: Seal, checks: Sequence[Check], step: Context, equal_sizes: bool = True
) -> Generator[Request, Any, Array]:
    """Return the messages of all ranks, end to end where ``message`` is."""
    request = Gather(message, equal_sizes)
    return (yield from _carried(request, [message], [seal], checks, step))


def scattered(
    messages: Sequence[Array], seals: Sequence[Seal], check: Check, step: Context
) -> Generator[Request, Any, Array]:
    """Send a message to each rank, and return those for this one, end to end where they are."""
    request = Alltoall(messages)
    return (yield from _carried(request, messages, seals, [check] * step.size, step))


def _carried(
    request: Collective,
    messages: Sequence[Array],
    seals: Sequence[Seal],
    checks: Sequence[Check],
    step: Context,
) -> Generator[Request, Any, Array]:
    xp, like = backend_of(messages[0]), messages[0]
    if step.reads_device:
        return xp.concat((yield request))
    # In one copy, for which the host waits once.
    whole, sizes = xp.to_numpy(xp.concat(messages)), [xp.size(message) for message in messages]
    frames = np.split(whole, np.cumsum(sizes)[:-1])
    for seal, frame in zip(seals, frames, strict=True):
        seal(frame)
    arrived = yield request.carrying(frames)
    for rank, (check, frame) in enumerate(zip(checks, arrived, strict=True)):
        check(frame, rank)
    return xp.from_numpy(np.concatenate(arrived), like)
