"""``DistributedOptimizer`` for this package's compressors, on top of Horovod's own.

Horovod's factory makes a class per optimizer, with the methods of its ``_DistributedOptimizer``.
We let it, hooks, names, groups and checks included, and then replace in that one class, which
nobody else has, the methods that start and finish the exchange.
"""

from __future__ import annotations

import abc
import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from hvd_compress.base import Compressor
from hvd_compress.config import check_seed
from hvd_compress.engines.base import Engine
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.integrations.horovod import bind_call, is_ours, with_seed
from hvd_compress.methods import as_compressor

from . import checkpoint
from .amp import scaler_steps
from .binding import Binding
from .engine import HorovodEngine
from .momentum import check_group


class CompressedOptimizer(abc.ABC):  # noqa: B024
    """``isinstance(optimizer, CompressedOptimizer)``: made by :func:`wrap_factory`'s product."""


#: those that are alive
bound_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()


def broadcast_state(optimizer: Any, root_rank: int, model: Any = None) -> None:
    """All ranks take over the state of ``root_rank``.

    As Horovod does, an optimizer that has not stepped yet leaves zeros where there are no
    gradients; sparse ones for embeddings of ``model`` that have such.
    """
    if not optimizer.state:
        modules = [] if model is None else model.modules()
        rows = {m.weight for m in modules if isinstance(m, torch.nn.Embedding) and m.sparse}
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.requires_grad and p.grad is None:
                    zeros = torch.zeros_like(p)
                    p.grad = zeros.to_sparse(1) if p in rows else zeros
    checkpoint.broadcast(optimizer, root_rank)


def wrap_factory(
    hvd: Any, factory: Callable[..., Any], engine: Callable[..., Engine] = HorovodEngine
) -> Callable[..., Any]:
    """Horovod's ``DistributedOptimizer``, or one like it, that takes this package's compressors as
    well; ``engine`` is called with ``hvd``, the process set and the predivide factor."""
    signature = with_seed(factory)

    @functools.wraps(factory)
    def DistributedOptimizer(*args: Any, **kwargs: Any) -> Any:  # noqa: N802
        call = bind_call(signature, args, kwargs, hvd.rank)
        compression = call.arguments["compression"]
        if hasattr(compression, "compress") and not is_ours(compression):
            return factory(*args, **kwargs)
        method = as_compressor(compression)
        _check(hvd, call.arguments, method)
        seed = call.arguments.pop("seed")
        call.arguments["compression"] = type(method)
        optimizer = factory(*call.args, **call.kwargs)
        # Horovod's class starts without these: a checkpoint may be in the state already, and
        # parameter groups that join later take their options from the defaults.
        inner = call.arguments["optimizer"]
        optimizer.state.update(inner.state)
        optimizer.defaults = inner.defaults
        shared = engine(hvd, optimizer.process_set, optimizer.gradient_predivide_factor)
        _take_over(optimizer, method, hvd, call.arguments["op"] == hvd.Sum, shared, seed)
        return optimizer

    DistributedOptimizer.__signature__ = signature  # type: ignore[attr-defined]
    DistributedOptimizer.__wrapped_by_hvd_compress__ = True  # type: ignore[attr-defined]
    return DistributedOptimizer


def _check(hvd: Any, options: dict[str, Any], method: Compressor) -> None:
    check_seed(options["seed"])
    if options["op"] == hvd.Adasum:
        raise ConfigError(
            f"op=Adasum cannot be combined with {method.name}: Adasum needs every rank's dense "
            "update; use op=hvd.Average, or Horovod's own compression"
        )
    if options["op"] not in (hvd.Average, hvd.Sum):
        raise ConfigError(f"op must be hvd.Average or hvd.Sum with {method.name}")
    if isinstance(options["optimizer"], torch.optim.LBFGS):
        raise UnsupportedError(
            "LBFGS evaluates gradients inside step(); Horovod cannot average them"
        )
    if isinstance(options["optimizer"], CompressedOptimizer):
        raise ConfigError(
            "this optimizer is distributed already; pass the one that it was made from"
        )
    for group in options["optimizer"].param_groups:
        # Now, since Horovod's factory leaves hooks on the parameters.
        check_group(method, options["optimizer"], group)


def _take_over(
    optimizer: Any, method: Compressor, hvd: Any, sums: bool, engine: Engine, seed: int
) -> None:
    cls = type(optimizer)
    CompressedOptimizer.register(cls)
    cls._user_class = cls.__bases__[0]
    cls._horovod_load_state_dict = cls.load_state_dict
    for function in _METHODS:
        setattr(cls, function.__name__, function)
    optimizer.compression = Binding(optimizer, method, hvd, sums, engine, seed)
    bound_optimizers.add(optimizer)
    checkpoint.adopt_momentum_buffers(optimizer)
    if not optimizer._grad_accs:
        # One rank, or none of the process set's: Horovod sets no hooks, since it would not
        # reduce. Momentum lives in the exchange, so a world of one has exchanges too.
        optimizer._groups = None
        optimizer._register_hooks()


# -- methods of the optimizer's class ---------------------------------------------------------


def _allreduce_grad_async(self: Any, p: torch.nn.Parameter) -> tuple[Any, None]:
    self.compression.exchange_gradients([p], in_backward=True)
    return True, None


def _grouped_allreduce_grad_async(self: Any, parameters: tuple[Any, ...]) -> tuple[Any, None]:
    self.compression.exchange_gradients(parameters, in_backward=True)
    return True, None


def _holds_averages(optimizer: Any) -> bool:
    """Nothing is new since the last exchange."""
    return optimizer._synchronized and not optimizer._handles and optimizer.compression.untouched()


def synchronize(self: Any) -> None:
    """Finish all exchanges; afterwards every ``p.grad`` holds the average."""
    if _holds_averages(self):
        return  # they must not be averaged again
    started: set[Any] = set()
    for key, (handle, _) in self._handles.items():
        if handle is not None:
            started.update(key if isinstance(key, tuple) else (key,))
    alone = self.compression.engine.size == 1
    for group in self.param_groups:
        for p in group["params"]:
            if not p.requires_grad or p in started:
                continue
            if p not in self._requires_update:
                self._watch(p)  # unfrozen after the optimizer was made
            if p.grad is None and alone:
                continue
            together = (p,)
            if self._groups is not None:  # all ranks must submit the same groups
                together = tuple(q for q in self._p_to_group[p] if q.requires_grad)
            self.compression.exchange_gradients(together)
            started.update(together)
    self.compression.finish()
    self.reset_hooks()
    self._synchronized = True


def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
    """Average the gradients unless told otherwise, then let the user's optimizer step."""
    loss = None
    if closure is not None:
        # Inside the user's step() the gradients would be used before they are averaged.
        with torch.enable_grad():
            loss = closure()
    if self._should_synchronize:
        if _holds_averages(self) and not scaler_steps():
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() after "
                "optimizer.synchronize(): gradients are averaged once here, and twice by Horovod's "
                "own optimizer; write `with optimizer.skip_synchronize(): optimizer.step()`",
                UserWarning,
                stacklevel=2,
            )
        self.synchronize()
    self._synchronized = False
    with self.compression.optimizer_step():
        result = self._user_class.step(self)
    return result if closure is None else loss


step.hooked = True  # type: ignore[attr-defined]  # the user's step() calls torch's step hooks


def zero_grad(self: Any, set_to_none: bool = True) -> None:
    if self._handles:
        raise AssertionError(
            "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
            "optimizer.synchronize(): the gradients are still being exchanged"
        )
    self._synchronized = False
    self._user_class.zero_grad(self, set_to_none)


def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
    """Parameters may join later, on all ranks alike; names follow their place in the groups."""
    check_group(self.compression.method, self, {**self.defaults, **param_group})
    self._user_class.add_param_group(self, param_group)
    index = len(self.param_groups) - 1
    for j, p in enumerate(self.param_groups[index]["params"]):
        self._parameter_names[p] = f"added.{index}.{j}"
        if p.requires_grad:
            self._watch(p)
    self.compression.forget_groups()


def _watch(self: Any, p: torch.nn.Parameter) -> None:
    """Start the exchange of ``p`` when its gradient is ready, as Horovod does at the beginning."""
    self._allreduce_delay[p] = self.backward_passes_per_step
    self._requires_update.add(p)
    if self._groups is not None:
        self._p_to_group[p] = (p,)
        self._group_counts[(p,)] = 0
    reference = weakref.ref(self)  # nothing would ever collect what a tensor's hook holds

    def hook(p: torch.nn.Parameter) -> None:
        if (optimizer := reference()) is not None:
            optimizer._make_hook(p)(p)

    p.register_post_accumulate_grad_hook(hook)


def reset_hooks(self: Any) -> None:
    """Counters as before the first backward pass of a step."""
    self._handles.clear()
    for p in self._allreduce_delay:
        self._allreduce_delay[p] = self.backward_passes_per_step
    for key in self._group_counts:
        self._group_counts[key] = 0


def groups_of_parameters(self: Any) -> list[tuple[torch.nn.Parameter, ...]] | None:
    """Those that are to be exchanged together; ``None`` without groups."""
    return None if self._groups is None else list(dict.fromkeys(self._p_to_group.values()))


_METHODS: tuple[Callable[..., Any], ...] = (
    _allreduce_grad_async,
    _grouped_allreduce_grad_async,
    _watch,
    add_param_group,
    checkpoint.consolidate_state_dict,
    checkpoint.load_state_dict,
    checkpoint.state_dict,
    groups_of_parameters,
    reset_hooks,
    step,
    synchronize,
    zero_grad,
)
