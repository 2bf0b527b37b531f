"""States that each rank keeps for itself, or for a shard, those of all ranks in one checkpoint.

Residuals differ between ranks, and most frameworks write one file on one rank.  Training depends on
their mean alone, and any number of ranks can load it.  A rank that gets back its own residuals goes
on with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from hvd_compress.reduce.state_file import entry, refused, whole

States = dict[str, dict[str, torch.Tensor]]
KEY = "ranks"
#: state dicts by the ranks' places in their nodes, and how many ranks a node has
_SHARDS, _OF = "shards", "ranks_per_node"


def placed(
    states: Mapping[str, Any], device_of: Callable[[str], torch.device | str]
) -> dict[str, dict[str, Any]]:
    """Return states by name, with their tensors on the devices that belong to the names."""
    return {
        name: {
            key: x.to(device_of(name)) if isinstance(x, torch.Tensor) else x
            for key, x in entry(states, name, Mapping).items()
        }
        for name in states
    }


def gathered(saved: dict[str, Any], group: Any) -> dict[str, Any]:
    """Return on the first rank of a process group the states of all, in a state dict.

    It contains what ``DDPState.state_dict`` has made on each rank.  The others get ``saved``.  A
    collective.
    """
    mine = {
        name: {key: saved["states"][name][key].cpu() for key in keys}
        for name, keys in saved["per_rank"].items()
    }
    everyones = _on_first(mine, group)
    return saved if everyones is None else {**saved, KEY: everyones}


def _on_first(x: Any, group: Any) -> list[Any] | None:
    """Gather objects on the first rank of a process group; ``None`` on the others."""
    is_first = dist.get_rank(group) == 0
    everyones: list[Any] | None = [None] * dist.get_world_size(group) if is_first else None
    first = 0 if group is None else dist.get_global_rank(group, 0)
    dist.gather_object(x, everyones, first, group)
    return everyones


def own(saved: Mapping[str, Any], rank: int, size: int) -> Mapping[str, Any]:
    """Return the part of a rank in a result of :func:`gathered`, or another state dict as it is.
    Another number of ranks gets the mean.
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


def of_shard(saved: Mapping[str, Any], inside: Any) -> dict[str, Any]:
    """Return the state dict of a rank's shard with its place in the node, whose group is
    ``inside``."""
    return {_OF: dist.get_world_size(inside), _SHARDS: {dist.get_rank(inside): saved}}


def of_all_shards(saved: dict[str, Any], inside: Any) -> dict[str, Any]:
    """Return on the first rank of a node what all its ranks have saved, each of its shard; on the
    others :func:`of_shard`.  A collective of the node."""
    # Else the first rank would put them on the other ranks' devices.
    saved = {**saved, "states": placed(saved["states"], lambda name: "cpu")}
    everyones, own = _on_first(saved, inside), of_shard(saved, inside)
    return own if everyones is None else {**own, _SHARDS: dict(enumerate(everyones))}


def own_shard(saved: Mapping[str, Any], inside: Any) -> Mapping[str, Any]:
    """Return what was saved of this rank's shard; ``inside`` is ``None`` where gradients are not
    divided.

    Raises:
        ConfigError: there is none, or nodes had another number of ranks.
    """
    if _OF not in saved and not saved.get("states"):  # before the first step
        return saved
    here = 1 if inside is None else dist.get_world_size(inside)
    there = whole(saved, _OF, 1) if _OF in saved else 1
    if here != there:
        raise refused(
            f"it was saved with nodes of {there} ranks, and here they have {here}: the shards are "
            "others. Make DDPState(..., nodes=...) as it was; or leave this state out, and "
            "training begins with empty residuals"
        )
    if inside is None:
        return saved
    shards, place = entry(saved, _SHARDS, Mapping), dist.get_rank(inside)
    if place not in shards:
        raise refused(
            f"it has the shards of places {', '.join(map(str, shards))} in a node, and this rank "
            f"is at {place}: load what state_dict() has returned on rank 0, or each rank its own"
        )
    found: Mapping[str, Any] = entry(shards, place, Mapping)
    return found
