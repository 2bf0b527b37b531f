"""The distributed optimizer, over Horovod and over MPI alike.

``DistributedOptimizer`` makes a class for every optimizer, whose first base is
:class:`CompressedOptimizer` and whose second is the user's own.  Hooks on the parameters notice
when a gradient is ready; ``optimizer.compression`` exchanges it, over public collectives only.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from hvd_compress.errors import CompressionError, ConfigError
from hvd_compress.integrations.options import HorovodOptions, check_passes

from ..amp import forget_scale, running_scale, scaled_passes, this_thread
from ..eager import run_eagerly
from ..parameters import (
    Parameter,
    check_param_group,
    check_trained,
    gradient_dtype,
    not_told,
    split_into_groups,
)
from ..state import checkpoint
from ..state.momentum import check_group
from ..state.optimizer_host import loss_of
from .binding import ParameterBinding, Watched, changed_since

#: optimizers that exchange gradients; as many as there are references to them elsewhere
bound_optimizers: weakref.WeakSet[CompressedOptimizer] = weakref.WeakSet()


def refuse_copies(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Raise ``ConfigError`` where an optimizer that meets other ranks is copied or pickled: what
    PyTorch copies of it could not step."""
    raise ConfigError(
        f"a distributed {type(optimizer).__name__} cannot be copied or pickled: save its "
        "state_dict(), and load it into one that was made in the same way"
    )


class CompressedOptimizer(torch.optim.Optimizer):
    """An optimizer whose ``step()`` works on the gradients of all ranks.

    ``DistributedOptimizer`` makes it, of the user's ``optimizer``, with the ``names`` of parameters
    and its ``options``.

    Attributes:
        compression: the method with its state: ``stats()``, ``set_epoch(epoch)``,
            ``report_at_exit()``, ``method``.
        op, gradient_predivide_factor, backward_passes_per_step, sparse_as_dense, process_set: the
            options of ``DistributedOptimizer``.

    >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0]))
    >>> sgd = torch.optim.SGD([w], lr=0.1)
    >>> optimizer = hvd.DistributedOptimizer(sgd, compression=hvd.TopK(density=0.5))
    >>> w.square().sum().backward()  # 6 and 2
    >>> optimizer.step()
    >>> isinstance(optimizer, torch.optim.SGD), w.detach(), optimizer.state[w]
    (True, tensor([2.4000, 1.0000]), {'compression.residual': tensor([0., 2.])})
    """

    compression: ParameterBinding

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        run_eagerly(cls, "step", "synchronize", "zero_grad", "discard")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        names: dict[Parameter, str],
        options: HorovodOptions,
    ) -> None:
        take_over(self, optimizer)
        self.op = options.op
        self.gradient_predivide_factor = options.gradient_predivide_factor
        self.backward_passes_per_step = options.backward_passes_per_step
        self.sparse_as_dense = options.sparse_as_dense
        self.process_set = options.process_set
        self._parameter_names = names
        #: what it was told of, in the order of the groups, in which nobody else should put others
        self.known_parameters = [p for group in self.param_groups for p in group["params"]]
        self._synchronized, self._should_synchronize = False, True
        self._lock = threading.RLock()  # one thread at a time: see _is_ready
        self._heir: type[Any] | None = None  # of the optimizer that has taken the parameters over
        # Those with a hook, by id: to hash a parameter takes long.
        self._watched: dict[int, Watched] = {}
        self._hooks: list[Any] = []
        weakref.finalize(self, _remove, self._hooks).atexit = False
        self._saw_passes = False  # backward passes since the last exchange
        self._has_warned_of_changes = False
        self._groups = split_into_groups(options.groups, self._trained())
        self._group_of = {p: group for group in self._groups or () for p in group}

    def begin(self, compression: ParameterBinding) -> None:
        """Exchange gradients from now on."""
        self.compression = compression
        self._take_charge(self._trained())
        checkpoint.adopt_momentum_buffers(self)
        bound_optimizers.add(self)

    # -- gradients that are ready ------------------------------------------------------------

    def _trained(self) -> list[Parameter]:
        return [p for p in self.known_parameters if p.requires_grad]

    def check_parameters(self) -> None:
        """Raise ``ConfigError`` if ``param_groups`` were changed by hand."""
        if (change := self._change_of_groups()) is not None:
            raise not_told(change)

    def _change_of_groups(self) -> str | None:
        """Return how parameter groups differ from the parameters that this was told of, which it
        watches and has names for; ``None`` if they are these."""
        now, known = list[Parameter](), self.known_parameters
        for group in self.param_groups:
            now += group["params"]
        if len(now) != len(known):
            return f"they have {len(now)} parameters in the place of {len(known)}"
        others = sum(map(operator.is_not, now, known))
        return f"{others} of their parameters are others than before" if others else None

    def _take_charge(self, parameters: Iterable[Parameter]) -> None:
        """Watch parameters, instead of any optimizer that was made of one of them before: both
        would exchange its gradient until the other is collected."""
        parameters = list(parameters)
        check_trained((self._parameter_names[p], p) for p in parameters)
        for p in parameters:
            gradient_dtype(p, self._parameter_names[p])
        retire_others(parameters, self)
        for p in parameters:
            if self._groups is not None and p not in self._group_of:  # it has come later
                self._group_of[p] = (p,)
                self._groups.append((p,))
            self._watched[id(p)] = Watched(p, self._parameter_names[p])
            # Nothing would ever collect what a tensor's hook holds, the tensor itself included.
            hook = functools.partial(_is_ready, weakref.ref(self), id(p))
            eager = torch.compiler.disable(hook)
            self._hooks.append(p.register_post_accumulate_grad_hook(eager))

    def _check_in_charge(self) -> None:
        if self._heir is not None:
            raise ConfigError(
                f"another DistributedOptimizer, a {self._heir.__name__}, was made of parameters of "
                "this one, and has taken them over: use that one, or make optimizers of different "
                "parameters"
            )

    def check_at_rest(self, call: str) -> None:
        """Raise ``ConfigError`` if gradients are under way, or are being added up."""
        if self._saw_passes or self.compression.reducer.is_under_way():
            raise ConfigError(
                "gradients are under way: call optimizer.step() or optimizer.synchronize() before "
                f"{call}"
            )

    def _together(self, p: Parameter) -> tuple[Parameter, ...]:
        """Return ``p`` and the parameters that are exchanged with it, the same on all ranks."""
        return tuple(q for q in self._group_of.get(p, (p,)) if q.requires_grad)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Add up the gradients of ``passes`` backward passes, from now on, before they are
        exchanged."""
        check_passes(passes)
        self.backward_passes_per_step = passes
        for watched in self._watched.values():  # what has been added up still is to be sent
            watched.passes = 0

    def reset_hooks(self) -> None:
        """Count backward passes from zero, as at the beginning of a step."""
        if scaled_passes:
            forget_scale()
        self._saw_passes = False
        for watched in self._watched.values():
            watched.passes, watched.is_started, watched.gradient = 0, False, None

    # -- steps -------------------------------------------------------------------------------

    def _holds_averages(self) -> bool:
        """Return whether no gradient is new since the last exchange."""
        return self._synchronized and not self._saw_passes and self.compression.untouched()

    def synchronize(self) -> None:
        """Finish all exchanges; afterwards every ``p.grad`` holds the average."""
        with self._lock:
            self._check_in_charge()
            if self._holds_averages():
                return  # they must not be averaged again
            if not self._has_warned_of_changes:
                self._warn_of_changes()
            alone = self.compression.reducer.is_alone
            for p in self._trained():
                if id(p) not in self._watched:
                    self._take_charge([p])  # unfrozen after the optimizer was made
                if self._watched[id(p)].is_started or (alone and p.grad is None):
                    continue
                together = self._together(p)
                if alone:
                    together = tuple(q for q in together if q.grad is not None)
                for q in together:
                    if id(q) not in self._watched:
                        self._take_charge([q])
                    self._watched[id(q)].is_started = True
                self.compression.exchange_gradients([self._watched[id(q)] for q in together])
            self.compression.finish()
            self.reset_hooks()
            self._synchronized = True
            self.check_parameters()  # after the exchange, in which ranks learn if only one differs

    def _warn_of_changes(self) -> None:
        found = changed_since(self._watched.values())
        if not found:
            return
        self._has_warned_of_changes = True
        warnings.warn(
            f"the gradient of {self._parameter_names[found[0]]!r} was changed between backward() "
            "and step(), when its exchange had begun: the change has no effect on what ranks "
            "receive, or on a part of it. To clip or scale averages write "
            "`optimizer.synchronize()` first, change them, then `with "
            "optimizer.skip_synchronize(): optimizer.step()`",
            UserWarning,
            stacklevel=4,
        )

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let ``step()`` in this context take the gradients as they are, after
        ``optimizer.synchronize()``."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients unless told otherwise, then let the user's optimizer step."""
        self._check_in_charge()
        # Inside the user's step() the gradients would be used before they are averaged.
        loss = None if closure is None else loss_of(closure)
        if self._should_synchronize:
            if self._holds_averages() and not this_thread.scaler_steps:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after "
                    "optimizer.synchronize(): gradients are averaged once here, and twice by "
                    "Horovod's own optimizer; write `with optimizer.skip_synchronize(): "
                    "optimizer.step()`",
                    UserWarning,
                    stacklevel=3,
                )
            self.synchronize()
        self.check_parameters()
        self._synchronized = False
        with self.compression.optimizer_step():
            result = super().step()
        return result if closure is None else loss

    step.hooked = True  # type: ignore[attr-defined]  # the user's step() calls torch's step hooks

    def discard(self) -> None:
        """Drop the gradients of this step; see :meth:`ParameterBinding.discard`."""
        with self._lock:
            if not self._synchronized:
                self.synchronize()
            self.zero_grad()

    def end_step(self) -> None:
        """Expect new gradients: those of this step are used up, or a scaler has left it out.
        States are then as they were, if that was kept."""
        if self._synchronized and self.compression.reducer.can_discard:
            self.compression.reducer.discard()
        self._synchronized = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients.

        Raises:
            AssertionError: gradients are being exchanged, or added up for an exchange.
        """
        if self._saw_passes:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before "
                "optimizer.step() or optimizer.synchronize(): the gradients are still being "
                "exchanged. If they are not wanted, freeze the parameters during that backward "
                "pass (requires_grad_(False)), or call optimizer.compression.keep_undo() before "
                "training and optimizer.compression.discard() here: what waits stays as it was"
            )
        if self._synchronized:
            self.compression.drop()
        self._synchronized = False
        if scaled_passes:
            forget_scale()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters later, on all ranks alike; they are named after their place in the
        groups."""
        self.check_parameters()
        check_param_group(param_group)
        super().add_param_group(param_group)
        index, group = len(self.param_groups) - 1, self.param_groups[-1]
        added = {p: f"added.{index}.{j}" for j, p in enumerate(group["params"])}
        try:
            check_group(self.compression.method, self, group)
            check_trained((name, p) for p, name in added.items())
        except CompressionError:
            self.param_groups.pop()
            raise
        self._parameter_names |= added
        self.known_parameters += added
        self._take_charge(p for p in added if p.requires_grad)

    # -- checkpoints -------------------------------------------------------------------------

    __getstate__ = refuse_copies
    consolidate_state_dict = checkpoint.consolidate_state_dict
    load_state_dict = checkpoint.load_state_dict
    state_dict = checkpoint.state_dict

    def users_state_dict(self) -> dict[str, Any]:
        """Return the state dict that the user's class makes of this optimizer."""
        return super().state_dict()

    def load_users_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what the user's class takes for a state dict."""
        super().load_state_dict(state_dict)
        self.reset_hooks()
        self._synchronized, self._should_synchronize = False, True


def _is_ready(reference: weakref.ref[CompressedOptimizer], place: int, _: Any) -> None:
    """Count a backward pass that has added to the gradient of a parameter.  If it was the last, the
    exchange begins as soon as a bucket can be sent.  PyTorch calls this for each parameter, so it
    calls as little as possible, and never waits.

    Args:
        reference: to the optimizer, which may be gone.
        place: the parameter's ``id``.

    Raises:
        AssertionError: the pass is one too many, or the gradient is part of a graph.
    """
    optimizer = reference()
    if optimizer is None or (watched := optimizer._watched.get(place)) is None:
        return
    # Autograd calls the hooks of several devices, or passes, from several threads.
    with optimizer._lock:
        needed, gradient = optimizer.backward_passes_per_step, watched.parameter.grad
        if watched.is_started or watched.passes >= needed:
            watched.gradient = None  # that it has changed is said here
            raise AssertionError(
                "a gradient was computed more than backward_passes_per_step times before "
                "step(): pass the number of backward passes as backward_passes_per_step, or "
                "call optimizer.synchronize() in between"
            )
        if gradient is not None and gradient.requires_grad:
            raise AssertionError(
                "a gradient is part of a graph, which cannot be exchanged: call loss.backward() "
                "without create_graph=True"
            )
        watched.passes += 1
        optimizer._saw_passes = True
        if watched.passes < needed:
            return
        if optimizer._groups is None:
            watched.is_started = True
            binding = optimizer.compression
            buckets = binding.reducer.intake
            binding.store.ready.append(watched)
            bucket = buckets.bucket_of.get(watched.name)
            if bucket is not None:
                bucket.unready -= 1
            is_due = bucket is None or (not bucket.unready and bucket is buckets.next)
            # What is known of a scale ends with the hook.
            if is_due or (scaled_passes and running_scale() is not None):
                binding.begin_ready()
            else:
                binding.reducer.poll()
        else:
            together = optimizer._together(watched.parameter)
            everyone = [w for q in together if (w := optimizer._watched.get(id(q))) is not None]
            if len(everyone) == len(together) and all(w.passes == needed for w in everyone):
                optimizer.compression.begin(everyone)


def retire_others(parameters: Iterable[Parameter], heir: torch.optim.Optimizer) -> None:
    """Let all optimizers but ``heir`` that exchange the gradient of one of the parameters end, or
    raise ``ConfigError`` if gradients are under way."""
    places = set(map(id, parameters))
    others = [o for o in bound_optimizers if o is not heir and places & o._watched.keys()]
    for other in others:
        other.check_at_rest("making another DistributedOptimizer of the same parameters")
    for other in others:
        other._heir = type(heir)
        bound_optimizers.discard(other)
        _remove(other._hooks)
        other._watched.clear()


def _remove(hooks: Iterable[Any]) -> None:
    for hook in hooks:
        hook.remove()


def take_over(distributed: torch.optim.Optimizer, optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer all that the user's has: options, state and step hooks.  Its class is made
    from the user's, whatever arguments that has."""
    # A scheduler that was made before has put its own step() in the way of the class's.
    cls = type(optimizer)
    distributed.__dict__.update(
        (key, value)
        for key, value in vars(optimizer).items()
        if not callable(getattr(cls, key, None))
    )
