"""Groups of ranks, as an option."""

from __future__ import annotations

from typing import Any

from hvd_compress.config import check_whole
from hvd_compress.errors import ConfigError

Groups = tuple[tuple[int, ...], ...]


def checked_groups(groups: Any, otherwise: str = "those of the nodes") -> Groups | int | None:
    """Return an option ``groups`` as tuples, or the number of ranks that make a group, or ``None``,
    which stands for ``otherwise``."""
    if groups is None:
        return None
    if isinstance(groups, int) and not isinstance(groups, bool):
        check_whole("groups", groups, 1)
        return groups
    try:
        found = tuple(tuple(int(rank) for rank in group) for group in groups)
    except (TypeError, ValueError):
        found = ()
    ranks = sorted(rank for group in found for rank in group)
    if not ranks or ranks != list(range(len(ranks))) or not all(found):
        raise ConfigError(
            f"groups must be None for {otherwise}, a number of ranks that make a group, or "
            f"lists that have every rank once, such as [[0, 1], [2, 3]]; got {groups!r}"
        )
    return found


def groups_of(groups: Groups | int, size: int) -> Groups:
    """Return the groups of so many ranks; of a number of ranks the last group may have fewer.

    >>> groups_of(2, 5)
    ((0, 1), (2, 3), (4,))
    """
    if isinstance(groups, int):
        ranks = range(size)
        return tuple(tuple(ranks[first : first + groups]) for first in range(0, size, groups))
    if sum(map(len, groups)) != size:
        raise ConfigError(f"groups={groups} are not of {size} ranks")
    return groups
