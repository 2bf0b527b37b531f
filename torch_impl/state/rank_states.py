"""States that each rank keeps for itself, those of all ranks in one checkpoint.

Residuals differ between ranks, and most frameworks write one file on one rank.  Their mean is all
that training depends on, and any number of ranks can load it; but only who gets back its own goes
on with the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from hvd_compress.reduce.state_file import entry, refused

States = dict[str, dict[str, torch.Tensor]]
KEY = "ranks"


def gathered(saved: dict[str, Any], group: Any) -> dict[str, Any]:
    """Return on the first rank of a process group the states of all, in the state dict that
    ``DDPState.state_dict`` has made on each; on the others ``saved``.  A collective."""
    mine = {
        name: {key: saved["states"][name][key].cpu() for key in keys}
        for name, keys in saved["per_rank"].items()
    }
    is_first = dist.get_rank(group) == 0
    everyones: list[Any] | None = [None] * dist.get_world_size(group) if is_first else None
    first = 0 if group is None else dist.get_global_rank(group, 0)
    dist.gather_object(mine, everyones, first, group)
    return {**saved, KEY: everyones} if is_first else saved


def own(saved: Mapping[str, Any], rank: int, size: int) -> Mapping[str, Any]:
    """Return the part of a rank in what :func:`gathered` returned, or what else was saved as it is.
    Where there are other numbers of ranks now, each gets the mean.

    Raises:
        ConfigError: it is damaged.
    """
    if KEY not in saved:
        return saved
    everyones: list[States] = entry(saved, KEY, list)
    if not everyones or any(not isinstance(states, Mapping) for states in everyones):
        raise refused(f"{KEY!r} has no states of ranks")
    states = {name: dict(state) for name, state in entry(saved, "states", Mapping).items()}
    try:
        for name, keys in entry(saved, "per_rank", Mapping).items():
            for key in keys:
                if len(everyones) == size:
                    states[name][key] = everyones[rank][name][key]
                else:
                    theirs = [each[name][key] for each in everyones]
                    states[name][key] = torch.stack(theirs).mean(0)
    except (LookupError, TypeError, RuntimeError) as error:
        raise refused(f"the states of ranks differ: {error!r}") from error
    is_mean = len(everyones) != size
    header = {"consolidated": is_mean, "rank": rank, "size": size}
    return {**{key: x for key, x in saved.items() if key != KEY}, **header, "states": states}
