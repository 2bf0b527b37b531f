"""What Horovod's optimizer gives to ours, for engines without Horovod: names of parameters, hooks
that notice when a gradient is ready, groups.

The attributes have the names that they have in Horovod, because the code of this package works on
either.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from hvd_compress.errors import ConfigError


class GradientHooks:
    """The second base of a distributed optimizer's class; the first is the user's own.

    What happens when a gradient is ready is added by ``distributed_optimizer``.
    """

    param_groups: list[dict[str, Any]]
    _allreduce_grad_async: Callable[..., Any]
    _grouped_allreduce_grad_async: Callable[..., Any]

    def _set_up(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
        backward_passes_per_step: int,
        predivide: float,
        groups: Any,
        sparse_as_dense: bool,
        process_set: Any,
    ) -> None:
        if backward_passes_per_step < 1:
            raise ConfigError(f"backward_passes_per_step={backward_passes_per_step}: 1 or more")
        self._parameter_names = self._named(named_parameters)
        self.backward_passes_per_step = backward_passes_per_step
        self.gradient_predivide_factor = predivide
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        self._allreduce_delay = dict.fromkeys(self._parameter_names, backward_passes_per_step)
        self._handles: dict[Any, Any] = {}
        self._grad_accs: list[Any] = []
        self._requires_update: set[torch.nn.Parameter] = set()
        self._synchronized, self._should_synchronize = False, True
        self._groups = _checked_groups(groups)
        self._p_to_group: dict[torch.nn.Parameter, tuple[torch.nn.Parameter, ...]] = {}
        self._group_counts: dict[tuple[torch.nn.Parameter, ...], int] = {}
        if process_set.included() and process_set.size() > 1:
            self._register_hooks()

    def _named(
        self, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None
    ) -> dict[torch.nn.Parameter, str]:
        if named_parameters is None:
            return {
                p: f"allreduce.noname.{i}.{j}"  # as Horovod calls them
                for i, group in enumerate(self.param_groups)
                for j, p in enumerate(group["params"])
            }
        named = list(named_parameters)
        if any(not isinstance(pair, tuple) for pair in named):
            raise ConfigError(
                "named_parameters must be pairs of name and parameter: model.named_parameters()"
            )
        names = [name for name, _ in named]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"named_parameters has the name {twice.pop()!r} twice")
        by_parameter = {p: name for name, p in named}
        unnamed = sum(p not in by_parameter for g in self.param_groups for p in g["params"])
        if unnamed:
            raise ConfigError(
                f"named_parameters lacks {unnamed} of the optimizer's parameters; leave it out to "
                "name them by their place"
            )
        return by_parameter

    def _register_hooks(self) -> None:
        watched = [p for g in self.param_groups for p in g["params"] if p.requires_grad]
        self._allreduce_delay.update(dict.fromkeys(watched, self.backward_passes_per_step))
        if self._groups is not None:
            parts = _split(self._groups, watched)
            self._p_to_group = {p: part for part in parts for p in part}
            self._group_counts = dict.fromkeys(parts, 0)
        for p in watched:
            self._requires_update.add(p)
            self._grad_accs.append(p.register_post_accumulate_grad_hook(self._make_hook(p)))

    def _make_hook(self, p: torch.nn.Parameter) -> Callable[[torch.Tensor], None]:
        reference = weakref.ref(self)  # nothing would ever collect what a tensor's hook holds

        def hook(p: torch.Tensor) -> None:
            if (optimizer := reference()) is not None:
                optimizer._is_ready(p)

        return hook

    def _is_ready(self, p: Any) -> None:
        key = p if self._groups is None else self._p_to_group[p]
        under_way = self._handles.get(key, (None, None))[0] is not None
        if under_way and self._allreduce_delay[p] <= 0:
            raise AssertionError(
                "a gradient was computed more than backward_passes_per_step times before "
                "step(): pass the number of backward passes as backward_passes_per_step, or "
                "call optimizer.synchronize() in between"
            )
        self._allreduce_delay[p] -= 1
        if self._allreduce_delay[p] > 0:
            self._handles[p] = (None, None)
        elif self._groups is None:
            self._handles[p] = self._allreduce_grad_async(p)
        else:
            self._count_group(self._p_to_group[p])

    def _count_group(self, group: tuple[torch.nn.Parameter, ...]) -> None:
        self._group_counts[group] += 1
        if self._group_counts[group] == len(group):
            for p in group:
                self._handles.pop(p, None)
            self._handles[group] = self._grouped_allreduce_grad_async(group)
            self._group_counts[group] = 0

    def set_backward_passes_per_step(self, passes: int) -> None:
        """As many backward passes add up before gradients are exchanged."""
        self.backward_passes_per_step = passes
        for p in self._allreduce_delay:
            self._allreduce_delay[p] = passes

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """``step()`` in this context does not synchronise again."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True


def _checked_groups(groups: Any) -> Any:
    if groups is None:
        return None
    if isinstance(groups, bool) or not isinstance(groups, int | list):
        raise ConfigError(
            f"groups={groups!r}: a number of groups, or a list of lists of parameters"
        )
    if isinstance(groups, int):
        if groups < 1:
            raise ConfigError(f"groups={groups}: 1 or more, or None")
        return groups
    members = [p for group in groups for p in group]
    if not all(isinstance(p, torch.Tensor) for p in members):
        raise ConfigError("groups must be lists of parameters")
    if len({id(p) for p in members}) < len(members):
        raise ConfigError("a parameter can only be in one of the groups")
    return groups


def _split(groups: Any, watched: list[torch.nn.Parameter]) -> list[tuple[torch.nn.Parameter, ...]]:
    """Groups as tuples; parameters in none of them are alone."""
    if isinstance(groups, int):
        bounds = [len(watched) * i // groups for i in range(groups + 1)]
        return [tuple(watched[a:b]) for a, b in itertools.pairwise(bounds) if a < b]
    known = set(watched)
    parts = [tuple(p for p in group if p in known) for group in groups]
    inside = {p for part in parts for p in part}
    return [part for part in parts if part] + [(p,) for p in watched if p not in inside]
