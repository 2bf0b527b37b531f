"""The description of an algorithm of a dense allreduce."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

#: blocks of an array that are in flight at once
DEPTH = 4


@dataclasses.dataclass(frozen=True)
class Allreduce:
    """An algorithm, which calls and the engine run alike; one module has one, as ``ALGORITHM``,
    and its name.

    Attributes:
        name: by which users choose it.
        run: ``run(channel, x, out, reduction)`` reduces the flat ``x`` into ``out``, which may be
            ``x``; it yields what it waits for, and looks at no element.
        pieces: the number of messages that it cuts an array into, given the number of ranks; a
            block of an array has that many.
        half_factor: bytes sent for a half precision, over those for an array of float32 of as many
            bytes.  Partial sums are sent as float32.
    """

    name: str
    run: Callable[..., Any]
    pieces: Callable[[int], int]
    half_factor: float = 1.5
