"""Checks of a saved optimizer, made before any of it is assigned."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from hvd_compress.config import is_number, is_whole
from hvd_compress.optimizers import Formula
from hvd_compress.reduce.state_file import StateHeader, check_array, entry, read_header, refused

from .optimizer_host import FormulaOptimizer
from .store import PREFIX

#: under which a state dict says what it is
KEY = "hvd_compress"
#: entries that SGD and Adam's family have for each parameter, as large as it
BUFFERS = frozenset({"momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"})
_ADAMS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)


class Entries(NamedTuple):
    """This package's for one parameter, and whether a momentum buffer stands beside them."""

    values: dict[str, Any]
    have_buffer: bool


def checked_header(state_dict: Any, parameters: int) -> tuple[StateHeader | None, set[int]]:
    """Return what :func:`state_dict` says of itself, ``None`` for the state dict of a plain
    optimizer, and the places of parameters whose gradients are rows."""
    saved = state_dict.get(KEY) if isinstance(state_dict, Mapping) else None
    if saved is None:
        return None, set()
    header, sparse = read_header(saved), entry(saved, "sparse", (list, tuple))
    if not all(map(is_whole, sparse)) or not set(sparse) <= set(range(parameters)):
        raise refused(f"'sparse' is {sparse!r} where places of {parameters} parameters belong")
    return header, set(sparse)


def checked_entries(optimizer: Any, state_dict: Any) -> tuple[dict[str, Any], dict[int, Entries]]:
    """Return a state dict for the user's optimizer, and this package's entries by the place of
    their parameter."""
    groups = entry(state_dict, "param_groups", (list, tuple))
    if len(groups) != len(optimizer.param_groups):
        raise refused(
            f"it has {len(groups)} parameter groups where {len(optimizer.param_groups)} are here"
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    places: list[Any] = []
    for there, here in zip(groups, optimizer.param_groups, strict=True):
        indices = entry(there, "params", (list, tuple), of="a parameter group")
        if len(indices) != len(here["params"]) or not all(map(is_whole, indices)):
            raise refused(f"a group has the parameters {indices!r}, of {len(here['params'])}")
        places += indices
        for option in optimizer.defaults.keys() & here.keys():
            _check_option(there, option, here[option])
    plain: dict[str, Any] = {**state_dict, "param_groups": list(groups), "state": {}}
    plain.pop(KEY, None)
    ours: dict[int, Entries] = {}
    everything = entry(state_dict, "state", Mapping)
    for index in everything:
        entries = entry(everything, index, Mapping)
        if index not in places:
            raise refused(f"'state' has an entry for {index!r}, which no group has")
        names = [key for key in entries if isinstance(key, str) and key.startswith(PREFIX)]
        place = places.index(index)
        values = {key.removeprefix(PREFIX): entries[key] for key in names}
        ours[place] = Entries(values, "momentum_buffer" in entries)
        _check_buffers(optimizer, parameters[place], entries)
        taken = {*names, "momentum_buffer"} if PREFIX + "velocity" in names else {*names}
        if not optimizer.compression.takes_optimizer_momentum:
            taken.discard("momentum_buffer")  # the optimizer's own momentum goes on
        if rest := {key: value for key, value in entries.items() if key not in taken}:
            if missing := _needed(optimizer) - rest.keys():
                raise refused(f"the state of parameter {index} has no {missing.pop()!r}")
            plain["state"][index] = rest
    return plain, ours


def _needed(optimizer: Any) -> set[str]:
    """Return the entries of which an optimizer steps with all, or before its first step with
    none."""
    if isinstance(optimizer, FormulaOptimizer):
        formula = optimizer.formula
        # Numbers begin where they are missing.
        arrays = (slot for slot in formula.slots if slot.kind == "array" and slot.since is None)
        return {*formula.counts, *(slot.name for slot in arrays)}
    return {"exp_avg", "exp_avg_sq", "step"} if isinstance(optimizer, _ADAMS) else set()


def _check_option(group: Any, option: str, here: Any) -> None:
    """Raise ``ConfigError`` unless a saved parameter group has an option of the kind that it has
    here."""
    is_flag = isinstance(here, bool | None)
    if is_flag and option not in group:  # younger than the file
        return
    there = entry(group, option, object, of="a parameter group")
    if is_flag and not isinstance(there, bool | None):
        raise refused(f"{option!r} is {there!r} where {here!r} is here")
    if is_flag:
        return
    pairs = [(there, here)]
    if isinstance(here, tuple | list):
        if not isinstance(there, tuple | list) or len(there) != len(here):
            raise refused(f"{option!r} is {there!r} where {here!r} is here")
        pairs = list(zip(there, here, strict=True))
    for value, own in pairs:
        if isinstance(own, int | float | torch.Tensor) and not _is_number(value):
            raise refused(f"{option!r} is {there!r} where {here!r} is here")


def _check_buffers(optimizer: Any, p: torch.Tensor, entries: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` unless the saved buffers of SGD, of Adam's family and of this package's
    optimizers are as large as the parameter."""
    slots = getattr(optimizer, "formula", Formula).slots
    own = {slot.name for slot in slots if slot.kind == "array"}
    for key in BUFFERS | own:
        if (x := entries.get(key)) is None:
            continue
        if not isinstance(x, torch.Tensor) or x.shape != p.shape:
            found = list(x.shape) if isinstance(x, torch.Tensor) else repr(x)
            raise refused(f"{key!r} has the shape {found} where {list(p.shape)} was expected")
        check_array(f"{key!r}", x)
    for key in {"step", "variance_step"} & entries.keys():
        if not _is_number(entries[key]) or entries[key] < 0:
            raise refused(f"{key!r} is {entries[key]!r} where a number from 0 was expected")


def _is_number(value: Any) -> bool:
    """Return whether ``value`` is a finite number, or a tensor of one."""
    if isinstance(value, torch.Tensor):
        has_one = value.numel() == 1 and value.layout is torch.strided and not value.is_meta
        return has_one and bool(value.isfinite())
    return is_number(value) and math.isfinite(value)
