"""Saving, loading and broadcasting the state of a compressed optimizer.

Residuals differ between ranks, and Horovod's users save rank 0 only.  Training depends on the mean
residual over the ranks, which is kept exactly if every rank goes on with the mean::

    optimizer.consolidate_state_dict()          # on every rank: averages what differs
    if hvd.rank() == 0:
        torch.save(optimizer.state_dict(), path)

    optimizer.load_state_dict(torch.load(path)) # on every rank, of any number

(The name is that of PyTorch's ``ZeroRedundancyOptimizer``, which has the same need.)  Without the
first line a state dict holds one rank's own state.  It is exact for the same rank of as many ranks.
Another rank that loads it warns, and loses its residuals.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from hvd_compress.base import Compressor, State
from hvd_compress.config import is_number, is_whole
from hvd_compress.engines.named import ProcessSetEngine
from hvd_compress.errors import UnsupportedError
from hvd_compress.methods.rows import rows_state
from hvd_compress.optimizers import Formula
from hvd_compress.reduce.choice import Choice
from hvd_compress.reduce.state_file import (
    StateHeader,
    check_array,
    entry,
    header_of,
    read_header,
    refused,
    restored,
    unconsolidated,
)

from .. import backend
from ..parameters import gradient_dtype, kind_without_bytes
from .optimizer_host import FormulaOptimizer
from .store import PREFIX, per_rank_of

#: under which a state dict says what it is
KEY = "hvd_compress"
#: entries that SGD and Adam's family have for each parameter, as large as it
BUFFERS = frozenset({"momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"})
_ADAMS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)


def state_dict(self: Any) -> dict[str, Any]:
    """Return the state dict of the user's optimizer, with this package's entries in it.

    Its momentum and Nesterov flag are the user's, also where the method applies them.
    """
    self.check_parameters()
    result, binding = local_state_dict(self), self.compression
    is_shared = result[KEY]["consolidated"] or binding.reducer.is_alone
    if not is_shared and any(_per_rank(binding, p) for p in self.known_parameters):
        warnings.warn(
            unconsolidated("optimizer.consolidate_state_dict()"), UserWarning, stacklevel=2
        )
    return result


def local_state_dict(optimizer: Any, *, own: bool = False) -> dict[str, Any]:
    """Return what :func:`state_dict` does, without the warning; with ``own``, this rank's state
    even after a consolidation."""
    binding = optimizer.compression
    means = {} if own else binding.consolidated or {}
    result = optimizer.users_state_dict()
    parameters, is_whole = optimizer.known_parameters, binding.reducer.node is None
    for index, p in enumerate(parameters):
        ours = binding.store.state_of(p) | means.get(p, {})
        entries = {PREFIX + key: x for key, x in ours.items()}
        if is_whole and binding.store.momentum_side.is_taken and "velocity" in ours:
            # For a plain SGD that takes over; load_state_dict() prefers the velocity.
            factor = binding.velocity_factor(p)
            if factor:
                buffer = (ours["velocity"] / factor).to(p.dtype).view(p.shape)
                entries["momentum_buffer"] = buffer
        if entries:
            result["state"][index] = result["state"].get(index, {}) | entries
    result[KEY] = {
        **header_of(binding.reducer, binding.consolidated is not None and not own),
        "sparse": [index for index, p in enumerate(parameters) if p in binding.store.sparse],
        "node": _place_of(optimizer),
    }
    return result


def _place_of(optimizer: Any) -> list[int]:
    """Return this rank's place in its node, and the number of ranks that share a gradient there."""
    node = optimizer.compression.reducer.node
    return [0, 1] if node is None else [node.place, node.ranks]


def _per_rank(binding: Any, p: torch.nn.Parameter) -> list[str]:
    """Return the keys of what a parameter keeps that differs between ranks."""
    kept = binding.store.state_of(p).keys()
    return sorted(kept & binding.store.per_rank(p)) if kept else []


def consolidate_state_dict(self: Any) -> None:
    """Average the entries that differ between ranks, for the next ``state_dict()``.

    This is a collective: call it on every rank.  Training goes on with each rank's own state.
    """
    self.check_parameters()
    self.check_at_rest("optimizer.consolidate_state_dict()")
    binding = self.compression
    own = {
        (p, key): binding.store.state_of(p)[key]
        for p in self.known_parameters
        for key in _per_rank(binding, p)
    }
    names = {(p, key): f"{self._parameter_names[p]}.{key}" for p, key in own}
    means = binding.reducer.average({names[pair]: x for pair, x in own.items()})
    binding.consolidated = {}
    for p, key in own:
        binding.consolidated.setdefault(p, {})[key] = means[names[p, key]]


def load_state_dict(self: Any, state_dict: dict[str, Any], *, exact: bool = False) -> None:
    """Load what :func:`state_dict` returned, or the state dict of a plain optimizer.

    Args:
        state_dict: its momentum buffers, if it comes from a plain SGD, become velocities.
        exact: take residuals as they are, whichever rank they come from.

    Raises:
        ConfigError: it belongs to another model, or it is damaged, or gradients are under way; then
            nothing has changed.
    """
    self.check_parameters()
    self.check_at_rest("optimizer.load_state_dict()")
    binding, parameters = self.compression, self.known_parameters
    saved, sparse = _checked_header(state_dict, len(parameters))
    plain, ours = _checked_entries(self, state_dict)
    here, there = _place_of(self), state_dict.get(KEY, {}).get("node", [0, 1])
    if here != there and any(own.values for own in ours.values()):
        raise refused(
            f"it has the shards of [place, ranks] {there!r} in a node, and this rank is at {here}: "
            "with nodes=... each rank of a node loads what a rank with its place has saved"
        )
    factor = 1.0 if exact or saved is None else saved.share(binding.engine)
    reducer = binding.reducer
    choice = None if reducer.choice is None else Choice.read(saved and saved.choice)
    method = reducer.method if choice is None else choice.method
    states = {
        parameters[place]: _loaded_state(
            self, method, parameters[place], own, place in sparse, factor
        )
        for place, own in ours.items()
    }
    before = self.state, self.param_groups
    try:
        self.load_users_state_dict(plain)
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        self.state, self.param_groups = before
        raise refused(f"{type(self).__name__} says {error!r}") from error
    binding.abandon()
    if choice is not None:
        reducer.take_choice(choice)
    reducer.step = 0
    if saved is not None:
        reducer.step, reducer.epoch, reducer.seed = saved.step, saved.epoch, saved.seed
    binding.store.sparse = {parameters[index] for index in sparse}
    for p, state in states.items():
        binding.store.set_state(p, state)
    adopt_momentum_buffers(self)


def _loaded_state(
    optimizer: Any,
    whole: Compressor,
    p: torch.nn.Parameter,
    entries: _Entries,
    is_sparse: bool,
    factor: float,
) -> State:
    """Return this package's state of a parameter from loaded entries.

    Args:
        whole: the method of all parameters.
        factor: this rank's share of entries that differ between ranks.
    """
    name, like = optimizer._parameter_names[p], optimizer.compression.store.own(p)
    method = whole.for_tensor(name, tuple(like.shape))
    more = {"decay": p.detach().reshape(-1)}
    if is_sparse:
        more |= {"velocity": backend.widen(like), **rows_state(method, like)}
    state, dropped = restored(
        name,
        method,
        like,
        entries.values,
        fresh=method.init(like),
        common=method.common(like),
        more=more,
        per_rank=per_rank_of(method, like, is_sparse),
        factor=factor,
        kinds=torch.Tensor,
        place=lambda x, template: (
            x.detach().to(template.device, template.dtype, copy=True).reshape(template.shape)
        ),
    )
    for key in dropped:
        # A velocity that is a momentum buffer too goes on as the optimizer's own momentum.
        if key != "velocity" or not entries.have_buffer:
            warnings.warn(f"{method.name} has no use for {key!r}: dropped", stacklevel=3)
    return state


class _Entries(NamedTuple):
    """This package's for one parameter, and whether a momentum buffer stands beside them."""

    values: dict[str, Any]
    have_buffer: bool


def _checked_header(state_dict: Any, parameters: int) -> tuple[StateHeader | None, set[int]]:
    """Return what :func:`state_dict` says of itself, ``None`` for the state dict of a plain
    optimizer, and the places of parameters whose gradients are rows."""
    saved = state_dict.get(KEY) if isinstance(state_dict, Mapping) else None
    if saved is None:
        return None, set()
    header, sparse = read_header(saved), entry(saved, "sparse", (list, tuple))
    if not all(map(is_whole, sparse)) or not set(sparse) <= set(range(parameters)):
        raise refused(f"'sparse' is {sparse!r} where places of {parameters} parameters belong")
    return header, set(sparse)


def _checked_entries(optimizer: Any, state_dict: Any) -> tuple[dict[str, Any], dict[int, _Entries]]:
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
    ours: dict[int, _Entries] = {}
    everything = entry(state_dict, "state", Mapping)
    for index in everything:
        entries = entry(everything, index, Mapping)
        if index not in places:
            raise refused(f"'state' has an entry for {index!r}, which no group has")
        names = [key for key in entries if isinstance(key, str) and key.startswith(PREFIX)]
        place = places.index(index)
        values = {key.removeprefix(PREFIX): entries[key] for key in names}
        ours[place] = _Entries(values, "momentum_buffer" in entries)
        _check_buffers(optimizer, parameters[place], entries)
        taken = {*names, "momentum_buffer"} if PREFIX + "velocity" in names else {*names}
        if not optimizer.compression.store.momentum_side.is_taken:
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


def adopt_momentum_buffers(optimizer: Any) -> None:
    """Take the momentum buffers of a plain SGD over as velocities of the compressor."""
    binding = optimizer.compression
    if not binding.store.momentum_side.is_taken:
        return
    for p in optimizer.known_parameters:
        buffer, store = optimizer.state.get(p, {}).pop("momentum_buffer", None), binding.store
        if buffer is not None and "velocity" not in store.state_of(p):
            part = store.own(p)
            state, own = store.method_for(p, part).init(part), store.own(buffer).reshape(-1)
            state["velocity"] = state["velocity"] + binding.velocity_factor(p) * own
            store.set_state(p, state)


def broadcast_optimizer_state(optimizer: Any, root_rank: int, model: Any = None) -> None:
    """Give all ranks the state of ``root_rank``.

    An optimizer that has not stepped yet leaves zeros where there are no gradients, as Horovod
    does.  They are sparse for embeddings of ``model`` with sparse gradients.
    """
    if not optimizer.state:
        modules = [] if model is None else model.modules()
        rows = {m.weight for m in modules if isinstance(m, torch.nn.Embedding) and m.sparse}
        for p in optimizer.known_parameters:
            if p.requires_grad and p.grad is None:
                dtype = gradient_dtype(p, optimizer._parameter_names[p])
                zeros = torch.zeros_like(p, dtype=dtype)
                p.grad = zeros.to_sparse(1) if p in rows else zeros
    broadcast(optimizer, root_rank)


def broadcast(optimizer: Any, root_rank: int) -> None:
    """Give all ranks the state of ``root_rank``.  Entries that differ between ranks become the mean
    over the ranks that have a state; new ranks in an elastic run have none."""
    binding, hvd = optimizer.compression, optimizer.compression.hvd
    parameters = optimizer.known_parameters
    payload = broadcast_tree(
        hvd, local_state_dict(optimizer, own=True) if hvd.rank() == root_rank else None, root_rank
    )
    binding.store.sparse = {parameters[index] for index in payload[KEY]["sparse"]}
    keys = (key for entries in payload["state"].values() for key in entries)
    if binding.reducer.node is not None and any(str(key).startswith(PREFIX) for key in keys):
        raise UnsupportedError(
            f"with nodes=... rank {root_rank} has the states of its own shards, which others have "
            "no use for: let each rank load what a rank with its place in a node has saved"
        )
    method = binding.method
    if binding.reducer.choice is not None:  # a rank that has just come may use another method
        method = Choice.read(payload[KEY]["choice"]).method
    alive = binding.step > 0 or any(binding.store.state_of(p) for p in parameters)
    own = {}
    for index, entries in payload["state"].items():
        p = parameters[index]
        own_method = method.for_tensor(optimizer._parameter_names[p], tuple(p.shape))
        for key in sorted(per_rank_of(own_method, p, p in binding.store.sparse)):
            if PREFIX + key in entries:
                zeros = torch.zeros_like(entries[PREFIX + key], device=p.device)
                mine = binding.store.state_of(p).get(key, zeros) if alive else zeros
                own[f"{index}.{key}"] = mine
    count = binding.reducer.average({"alive": torch.tensor([float(alive)])})["alive"].item()
    for name, mean in binding.reducer.average(own).items():
        index, key = name.split(".", 1)
        payload["state"][int(index)][PREFIX + key] = mean / count if count else mean
    load_state_dict(optimizer, payload, exact=True)
    binding.reducer.forget_plan()  # a worker that has just come has none


class _Slot(NamedTuple):
    """Stands for a tensor that is sent by itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def broadcast_tree(hvd: Any, tree: Any, root_rank: int) -> Any:
    """Broadcast a nest of dicts, lists and tensors from the root to all ranks, and return it.
    Tensors are sent one by one, and arrive on the CPU.

    Raises:
        UnsupportedError: on all ranks, if a tensor of the root has no bytes to send.
    """
    tensors: list[torch.Tensor] = []
    unsent: list[str] = []

    def take(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if kind := kind_without_bytes(value):
                unsent.append(kind)
                return None
            tensors.append(value.detach().cpu().contiguous())
            return _Slot(tuple(value.shape), value.dtype)
        return _map(take, value)

    found = take(tree), unsent
    skeleton, unsent = hvd.broadcast_object(found, root_rank, name="hvd_compress.state")
    if unsent:
        raise UnsupportedError(
            f"the state of rank {root_rank} has {unsent[0]}, which has no bytes to send: make "
            "it dense, or load the same checkpoint on every rank instead of a broadcast"
        )
    sent = iter(tensors)
    count = 0

    def fill(value: Any) -> Any:
        nonlocal count
        if not isinstance(value, _Slot):
            return _map(fill, value)
        here = (
            next(sent) if hvd.rank() == root_rank else torch.empty(value.shape, dtype=value.dtype)
        )
        if here.numel():
            # As bytes: Horovod does not broadcast every dtype.
            raw = here.reshape(-1).view(torch.uint8)
            here = hvd.broadcast(raw, root_rank, name=f"hvd_compress.state.{count}")
            here = here.view(value.dtype).view(value.shape)
        count += 1
        return here

    return fill(skeleton)


def _map(function: Any, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: function(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(function(item) for item in value)
    return value


def _abandon(optimizer: Any) -> None:
    """Discard what is under way: the workers that it was shared with are no longer those."""
    optimizer.compression.abandon()
    optimizer.reset_hooks()


def elastic_handler(base: type[Any]) -> type[Any]:
    """Return a handler for ``hvd.elastic.TorchState``.

    Args:
        base: Horovod's ``StateHandler``.
    """

    class CompressedOptimizerHandler(base):
        """A commit keeps the rank's own residuals; a new set of workers starts from their mean."""

        def __init__(self, optimizer: Any) -> None:
            if optimizer.compression.reducer.node is not None:
                raise UnsupportedError(
                    "hvd.elastic changes the workers, and nodes=... divides states among those of "
                    "a node: leave one of the two out"
                )
            super().__init__(optimizer)
            self.save()

        def save(self) -> None:
            self._saved = copy.deepcopy(local_state_dict(self.value, own=True))

        def restore(self) -> None:
            _abandon(self.value)
            load_state_dict(self.value, copy.deepcopy(self._saved), exact=True)

        def sync(self) -> None:
            _abandon(self.value)
            ProcessSetEngine.begin_generation()
            broadcast(self.value, root_rank=0)
            self.save()

    return CompressedOptimizerHandler


def local_elastic_handler(base: type[Any]) -> type[Any]:
    """Return a handler for ``hvd.elastic.TorchState`` of optimizers with local steps.

    Args:
        base: Horovod's ``OptimizerStateHandler``.
    """

    class LocalStepsHandler(base):
        """Horovod's own, but workers count their engines from the beginning."""

        def sync(self) -> None:
            ProcessSetEngine.begin_generation()
            super().sync()

    return LocalStepsHandler
