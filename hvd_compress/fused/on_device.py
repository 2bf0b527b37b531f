"""Messages that are made in a device's memory, and read there."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context
from hvd_compress.requests import Gather
from hvd_compress.wire.header import Header, failing, opened

_CAUSES = (
    "the ranks do not run the same version with the same compression options, or some have no GPU"
)


def gathered(message: Array, header: Header, step: Context) -> Generator[Gather, Any, Array]:
    """Return the messages of all ranks, which have equal sizes, end to end where ``message`` is.

    Where engines read that memory, nobody waits.  Others get a copy with a header, by which damage
    is noticed.

    Raises:
        PayloadError: a message is damaged, or was made with other options.
    """
    xp = backend_of(message)
    if step.reads_device:
        return xp.concat((yield Gather(message, equal_sizes=True)))
    frame = header.seal(xp.to_numpy(message))
    arrived = yield Gather(xp.from_numpy(frame, None), equal_sizes=True)
    found = [xp.to_numpy(theirs) for theirs in arrived]
    for rank, theirs in enumerate(found):
        fail = failing(f"rank {rank}", _CAUSES)
        if opened(theirs, header.kind, fail=fail) != header or theirs.size != frame.size:
            raise fail(f"no header of {header.number} entries, or not {frame.size} bytes")
    return xp.from_numpy(np.concatenate(found), message)
