"""Parameters: which are plain tensors, and their names and groups as Horovod gives them."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hvd_compress.errors import ConfigError, UnsupportedError

Parameter = torch.nn.Parameter
Groups = int | list[list[Parameter]] | None

#: whether a tensor is one inside of torch.func
is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def is_sharded(x: torch.Tensor) -> bool:
    """Return whether a tensor is a ``DTensor``."""
    tensors = sys.modules.get("torch.distributed.tensor")  # whose import takes long
    return tensors is not None and isinstance(x, tensors.DTensor)


def local(x: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor: itself, or the shard of a ``DTensor``."""
    shard: torch.Tensor = x.to_local() if is_sharded(x) else x  # type: ignore[attr-defined]
    return shard


def moved(tree: Any, devices: Mapping[str, torch.device], device: Any = None) -> Any:
    """Return the tree with its tensors on the devices of the parameters that they belong to."""
    if isinstance(tree, Mapping):
        return {key: moved(x, devices, devices.get(key, device)) for key, x in tree.items()}
    return tree.to(device) if isinstance(tree, torch.Tensor) and device else tree


def check_plain(x: torch.Tensor, name: str | None = None) -> None:
    """Raise ``UnsupportedError`` unless the elements of ``x`` are in memory of its own; ``name`` is
    that of the parameter."""
    flattened = getattr(x, "_fsdp_flattened", False)  # FSDP1 has laid it out among others
    if not (_is_elsewhere(x) or flattened):
        return
    detail = " on the device meta" if x.is_meta else " of quantised elements" * x.is_quantized
    detail += " of which FullyShardedDataParallel has left this rank a part" * flattened
    what = "what" if name is None else f"{name!r}, which"
    raise UnsupportedError(
        f"cannot compress {what} is a {type(x).__name__}{detail}: parameters that are trained, and "
        "gradients, must be plain tensors, whole on every rank. "
        + "Write fully_shard in its place. " * flattened
        + (_SHARDED if flattened or is_sharded(x) else _ELSEWHERE)
    )


def kind_without_bytes(x: Any) -> str:
    """Return the kind of an object that has no bytes to send; an empty text if it has.  It is no
    tensor then, or its elements are not in memory of its own, one by one."""
    if not isinstance(x, torch.Tensor):
        return f"a {type(x).__name__}"
    if x.layout != torch.strided or _is_elsewhere(x):
        return f"a {type(x).__name__} of {x.dtype}{list(x.shape)}, {x.layout}, on {x.device}"
    return ""


def _is_elsewhere(x: torch.Tensor) -> bool:
    # Subclasses that see every operation, of which DTensor is one, have their elements elsewhere.
    kind: Any = type(x)
    sees_operations = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return sees_operations or x.is_meta or x.is_quantized or is_wrapped(x)


_SHARDED = (
    "For a model that FSDP has sharded there is "
    "hvd_compress.torch.compress_replicas(model, mesh['replica'], ...), or a training method "
    "between replicas, hvd.DistributedOptimizer(optimizer, method=hvd.DiLoCo(), "
    "process_set=mesh['replica']); with tensor parallelism alone, wrap the model in "
    "DistributedDataParallel and give it the hook of hvd_compress.torch.ddp"
)
_ELSEWHERE = (
    "Freeze it by requires_grad_(False) and train plain tensors beside it, as LoRA does; "
    "outside of torch.func, FakeTensorMode and the device meta, make the optimizer of the real "
    "model"
)


def names_of_parameters(
    param_groups: Sequence[dict[str, Any]],
    named_parameters: Iterable[tuple[str, Parameter]] | None,
    *,
    sharded: bool = False,
) -> dict[Parameter, str]:
    """Return the name of every parameter.

    Args:
        param_groups: those of the optimizer.
        sharded: parameters may be divided among ranks.
        named_parameters: ``model.named_parameters()``; ``None`` for names by place,
            ``allreduce.noname.GROUP.INDEX``.

    Raises:
        ConfigError: a name is given twice, or a parameter of the optimizer has none.
        UnsupportedError: a parameter that is trained is no plain tensor.
    """
    everyone = [p for group in param_groups for p in group["params"]]
    if named_parameters is None:
        names = {
            p: f"allreduce.noname.{i}.{j}"
            for i, group in enumerate(param_groups)
            for j, p in enumerate(group["params"])
        }
    else:
        named = list(named_parameters) if isinstance(named_parameters, Iterable) else [None]
        if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in named):
            raise ConfigError(
                "named_parameters must be a sequence of tuples (name, parameter): pass "
                "model.named_parameters()"
            )
        counted = Counter(name for name, _ in named)
        if twice := [name for name, count in counted.items() if count > 1]:
            raise ConfigError(
                f"the names in named_parameters must be unique; more than once: {', '.join(twice)}"
            )
        names = {p: name for name, p in sorted(named, key=lambda pair: pair[0])}
        if unnamed := sum(p not in names for p in everyone):
            raise ConfigError(
                f"named_parameters lacks {unnamed} of the optimizer's parameters: name them all, "
                "or leave it out to name them by their place"
            )
    check_trained(((names[p], p) for p in everyone), sharded)
    return names


def check_trained(named: Iterable[tuple[str, Parameter]], sharded: bool = False) -> None:
    """Raise ``UnsupportedError`` if one of the trained parameters is no plain tensor.  Frozen ones
    are not sent, such as quantised bases under LoRA."""
    for name, p in named:
        if p.requires_grad and not (sharded and is_sharded(p)):
            check_plain(p, name)


def gradient_dtype(p: Parameter, name: str) -> torch.dtype:
    """Return the dtype of a parameter's gradient, or raise ``UnsupportedError`` if it may be of
    any: a rank that has none sends zeros of it."""
    dtype = getattr(p, "grad_dtype", p.dtype)  # which older versions of PyTorch have not
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError(
            f"{name!r} has grad_dtype=None, so its gradient may have another dtype on each rank: "
            "name one, p.grad_dtype = p.dtype"
        )
    return dtype


def not_told(change: str) -> ConfigError:
    """Return the error for parameter groups that differ from what an optimizer was told."""
    return ConfigError(
        f"the optimizer's param_groups were changed by hand: {change}. Add parameters by "
        "optimizer.add_param_group({'params': [...]}) on all ranks; where others replace old ones, "
        "make the optimizer again after optimizer.step(), "
        "hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), ...)"
    )


def check_model(model: Any) -> None:
    """Raise ``ConfigError`` unless this is a model."""
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, not {type(model).__name__}")


def check_optimizer(optimizer: Any) -> None:
    """Raise ``ConfigError`` unless this is an optimizer."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}"
        )


def check_param_group(group: Any) -> None:
    """Raise ``ConfigError`` unless this is what ``add_param_group`` takes; PyTorch says what is
    wrong inside of it."""
    if not isinstance(group, dict) or "params" not in group:
        raise ConfigError(f"add_param_group takes {{'params': [...], ...}}; got {group!r}")


def check_groups(groups: Groups, option: str = "groups") -> None:
    """Raise ``ConfigError`` unless this is a value for the option ``groups``."""
    if groups is None:
        return
    if isinstance(groups, bool) or not isinstance(groups, int | list):
        raise ConfigError(
            f"{option}={groups!r}: pass the number of groups, or a list of lists of parameters"
        )
    if isinstance(groups, int):
        if groups < 1:
            raise ConfigError(f"{option}={groups}: pass 1 or more, or None for no groups")
        return
    # The elements of a tensor are tensors, too.
    if not all(isinstance(g, Iterable) and not isinstance(g, torch.Tensor) for g in groups):
        raise ConfigError("groups must be a list of lists of parameters, or a number of groups")
    members = [p for group in groups for p in group]
    if not all(isinstance(p, torch.Tensor) for p in members):
        raise ConfigError("groups must be lists of parameters, that is of torch.Tensor")
    if len({id(p) for p in members}) < len(members):
        raise ConfigError("a parameter can only be in one of the groups, and there only once")


def split_into_groups(
    groups: Groups, parameters: Sequence[Parameter]
) -> list[tuple[Parameter, ...]] | None:
    """Divide ``parameters`` into those that are exchanged together, or return ``None``.

    A number of groups makes parts of equal length in the order of the parameters.  If there is a
    remainder, the first parts are longer by one.  Lists count with their members among
    ``parameters``; a parameter in none of the lists is a group of its own.
    """
    if groups is None:
        return None
    if isinstance(groups, int):
        length, longer = divmod(len(parameters), groups)
        bounds = [i * length + min(i, longer) for i in range(groups + 1)]
        pieces = (tuple(parameters[a:b]) for a, b in itertools.pairwise(bounds))
        return [piece for piece in pieces if piece]
    known = set(parameters)
    parts = [tuple(p for p in group if p in known) for group in groups]
    inside = {p for part in parts for p in part}
    return [part for part in parts if part] + [(p,) for p in parameters if p not in inside]
