"""How arrays are divided among ranks, and into blocks: as evenly as possible."""

from __future__ import annotations

import functools
from typing import Any


def bounds_of(n: int, parts: int, unit: int = 1) -> list[int]:
    """The bounds of ``parts`` even pieces of ``n`` elements: ``parts + 1`` ascending numbers from 0
    to ``n``.

    Pieces consist of whole units of ``unit`` elements, and differ by one unit at most.  The last
    unit may be shorter.  With fewer units than parts some pieces are empty.

    >>> bounds_of(10, 4), bounds_of(10, 2, unit=4)
    ([0, 2, 5, 7, 10], [0, 4, 10])
    """
    units = -(-n // unit)
    return [min(n, unit * (units * i // parts)) for i in range(parts + 1)]


@functools.lru_cache(4096)
def shards_of(n: int, parts: int, unit: int = 1) -> tuple[slice, ...]:
    """The pieces between :func:`bounds_of`, in order.

    >>> shards_of(5, 2)
    (slice(0, 2, None), slice(2, 5, None))
    """
    bounds = bounds_of(n, parts, unit)
    return tuple(map(slice, bounds, bounds[1:]))


def divided(n: Any, whole: int, start: Any, stop: Any) -> Any:
    """The part of ``n`` that belongs to ``start`` to ``stop`` of ``whole``; the parts of neighbours
    add up to all.

    >>> divided(10, 3, 0, 1), divided(10, 3, 1, 3)
    (3, 7)
    """
    return n * stop // whole - n * start // whole if whole else n
