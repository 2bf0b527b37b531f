"""Messages that are made in a device's memory, and read there."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context
from hvd_compress.requests import Collective, Gather, Request
from hvd_compress.wire.header import Header, failing, opened

_CAUSES = (
    "the ranks do not run the same version with the same compression options, or some have no GPU"
)


def gathered(message: Array, header: Header, step: Context) -> Generator[Request, Any, Array]:
    """Return the messages of all ranks, which have equal sizes, end to end where ``message`` is.

    Raises:
        PayloadError: a message is damaged, or was made with other options.
    """
    size = backend_of(message).size(message)

    def check(frame: np.ndarray, rank: int) -> None:
        fail = failing(f"rank {rank}", _CAUSES)
        if opened(frame, header.kind, fail=fail) != header or frame.size != size:
            raise fail(f"no header of {header.number} entries, or not {size} bytes")

    request = Gather(message, equal_sizes=True)
    return (yield from carried(request, [message], [header.seal], [check] * step.size, step))


def carried(
    request: Collective,
    messages: Sequence[Array],
    seals: Sequence[Callable[[np.ndarray], Any]],
    checks: Sequence[Callable[[np.ndarray, int], Any]],
    step: Context,
) -> Generator[Request, Any, Array]:
    """Send messages, which a request has, and return what arrives, end to end where they are.

    Where engines read that memory, nobody waits.  Others get copies with headers, by which damage
    is noticed.

    Args:
        seals: write the header of each message.
        checks: raise an error if what has come from a rank, whose number they are given, is
            damaged.
    """
    xp, like = backend_of(messages[0]), messages[0]
    if step.reads_device:
        return xp.concat((yield request))
    # In one copy, for which the host waits once.
    whole, sizes = xp.to_numpy(xp.concat(messages)), [xp.size(message) for message in messages]
    frames = np.split(whole, np.cumsum(sizes)[:-1])
    for seal, frame in zip(seals, frames, strict=True):
        seal(frame)
    arrived = yield request.carrying([xp.from_numpy(frame, None) for frame in frames])
    found = [xp.to_numpy(frame) for frame in arrived]
    for rank, (check, frame) in enumerate(zip(checks, found, strict=True)):
        check(frame, rank)
    return xp.from_numpy(np.concatenate(found), like)
