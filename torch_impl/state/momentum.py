"""Momentum and weight decay of an optimizer whose method takes them over."""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hvd_compress.base import Compressor, State
from hvd_compress.errors import ConfigError, NeedsTuning
from hvd_compress.methods.optimizers import (
    another_kind,
    check_one_momentum,
    check_partner,
    moved,
    too_coarse,
    velocity_of_one,
)

logger = logging.getLogger("hvd_compress")


class Momentum:
    """Decides which momentum acts inside the exchange, and switches it off in the optimizer.

    Args:
        optimizer: whose parameter groups have ``momentum``, ``nesterov`` and ``weight_decay``.
        method: the compression method.
        tells: whether this rank logs and warns.

    Attributes:
        is_taken: the momentum of the optimizer acts inside of the exchange.
    """

    def __init__(self, optimizer: Any, method: Compressor, tells: bool) -> None:
        self._reference: Any = weakref.ref(optimizer)  # which owns the owner of this
        self._method = method
        self._inside = functools.lru_cache(64)(method.momentum_inside)
        self._groups: dict[int, dict[str, Any]] = {}  # by id: to hash a parameter takes long
        self._read: list[dict[str, Any]] = []  # the groups of which that is
        self._look(optimizer.param_groups)
        self.is_taken = method.takes_momentum and isinstance(optimizer, torch.optim.SGD)
        if tells and (warning := too_coarse(method, optimizer)):
            warnings.warn(warning, NeedsTuning, stacklevel=5)
        if method.takes_momentum and tells and method.momentum is None:
            self._tell()

    def _tell(self) -> None:
        optimizer = self._reference()
        wrapped = type(optimizer).__name__
        if not self.is_taken:
            warnings.warn(another_kind(self._method, wrapped), UserWarning, stacklevel=6)
            return
        momenta = sorted({group["momentum"] for group in optimizer.param_groups})
        if any(momenta):
            nesterov = any(group["nesterov"] for group in optimizer.param_groups)
            logger.info("%s", moved(self._method, momenta, nesterov, wrapped))

    @property
    def decays_gradients(self) -> bool:
        """Weight decay joins each rank's gradient before it is exchanged, and not the average."""
        return self.is_taken and self._method.weight_decay == "gradient"

    def group_of(self, p: torch.nn.Parameter) -> dict[str, Any]:
        """Return the parameter group with the options of ``p``."""
        self._look_again()
        return self._groups[id(p)]

    def of_all(self, parameters: Sequence[torch.nn.Parameter]) -> list[float]:
        """Return the momenta that act inside the exchange."""
        if not self.is_taken:
            return [0.0] * len(parameters)
        self._look_again()
        found, momenta = list[float](), dict[int, float]()
        for p in parameters:
            group = self._groups[id(p)]
            if id(group) not in momenta:
                momenta[id(group)] = self.of_group(group)[0]
            found.append(momenta[id(group)])
        return found

    def _look_again(self) -> None:
        groups = self._reference().param_groups
        if len(groups) != len(self._read) or any(map(operator.is_not, groups, self._read)):
            self._look(groups)

    def _look(self, groups: list[dict[str, Any]]) -> None:
        self._read = list(groups)
        # Parameters that were taken out of the groups may be under way still.
        self._groups |= {id(p): g for g in groups for p in g["params"]}

    def of(self, p: torch.nn.Parameter) -> tuple[float, bool]:
        """Return the (momentum, nesterov) that act inside the exchange, or beside it on rows and
        decay."""
        return self.of_group(self.group_of(p))

    def of_group(self, group: Mapping[str, Any]) -> tuple[float, bool]:
        """Return the same of the parameters of a group."""
        if not self.is_taken:
            return 0.0, False
        return self._inside(group["momentum"], group["nesterov"])

    def factor(self, p: torch.nn.Parameter) -> float:
        """Return the velocity that has the effect of a momentum buffer of 1 in plain SGD, with the
        sign of ``maximize``."""
        return velocity_of_one(*self.of(p)) * (-1 if self.group_of(p)["maximize"] else 1)

    @contextlib.contextmanager
    def switched_off(self) -> Iterator[None]:
        """Switch off, while the user's optimizer steps, what has acted already."""
        options = []
        try:
            for group in self._reference().param_groups if self.is_taken else ():
                off = {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
                options.append((group, {key: group[key] for key in off}))
                group.update(off)
            yield
        finally:
            for group, kept in options:
                group.update(kept)

    def decay(
        self,
        states: Mapping[torch.nn.Parameter, State],
        sparse: set[torch.nn.Parameter],
        method_for: Callable[[torch.nn.Parameter], Compressor],
    ) -> None:
        """Add q = m q + wd w to the averaged gradient, as in the authors' released code.  Weights
        are equal on all ranks, so decay need not be sent, and has no residual.  Beside momentum
        that is a moving average, which does not add up, it is wd w."""
        for p, state in states.items():
            group = self.group_of(p)
            wd = group["weight_decay"]
            if p.grad is None or (not wd and "decay" not in state):
                continue
            if self.decays_gradients and p not in sparse:
                continue  # rows are exchanged without decay
            m, nesterov = self.of(p)
            w = p.detach() if not group["maximize"] else -p.detach()
            if p.grad.is_sparse:
                p.grad = p.grad.to_dense()
            if method_for(p).averages_momentum:
                p.grad.add_(w, alpha=wd)
                continue
            if "decay" not in state:
                state["decay"] = p.detach().new_zeros(p.numel())
            q = state["decay"].view(p.shape).mul_(m).add_(w, alpha=wd)
            if nesterov:
                p.grad.add_(w, alpha=wd).add_(q, alpha=m)
            else:
                p.grad.add_(q)


def check_sparse_step(optimizer: Any, method: Compressor) -> None:
    """Raise ``ConfigError`` unless steps along sparse gradients are those along dense ones."""
    if type(optimizer) is not torch.optim.SGD and torch.optim.SGD not in type(optimizer).__bases__:
        raise ConfigError(
            f"sparse_step=True needs torch.optim.SGD, and {type(optimizer).__name__} may change "
            "elements whose gradient is zero: leave it out"
        )
    for group in optimizer.param_groups:
        if group["weight_decay"]:
            raise ConfigError(
                f"sparse_step=True cannot decay weights (weight_decay={group['weight_decay']}), "
                "which changes all elements: leave one of the two out"
            )
        if group["momentum"] and not method.takes_momentum:
            raise ConfigError(
                f"sparse_step=True goes with momentum={group['momentum']} only if the method takes "
                f"it over, as DGC does; {method.name} does not: momentum=0"
            )
        if group["fused"]:
            raise ConfigError("sparse_step=True: SGD(fused=True) takes no sparse gradients")


def check_group(method: Compressor, optimizer: Any, group: dict[str, Any]) -> None:
    """Raise if the options of a parameter group do not go with the method's momentum."""
    check_partner(method, optimizer, group)
    if not method.takes_momentum:
        return
    is_sgd = isinstance(optimizer, torch.optim.SGD)
    if is_sgd or method.momentum:  # another kind of momentum may act beside none
        check_one_momentum(method, group.get("momentum", 0))
    if is_sgd and group["dampening"]:
        raise ConfigError(
            f"{method.name} takes the optimizer's momentum over and knows no "
            f"dampening={group['dampening']}; use dampening=0"
        )
