"""The binding of a compressor to one optimizer: gradients go in, and averages come back."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from hvd_compress.base import Compressor, Sparse, State
from hvd_compress.engines.base import Engine
from hvd_compress.engines.local import LocalEngine
from hvd_compress.errors import ConfigError
from hvd_compress.reduce import Reducer
from hvd_compress.reduce.nodes import Node
from hvd_compress.stats import Stats

from .. import backend
from ..amp import running_scale, scaled_passes
from ..controls import Controls
from ..parameters import gradient_dtype, is_wrapped
from ..state.momentum import Momentum, check_sparse_step
from ..state.store import Gradient, ParameterStore

logger = logging.getLogger("hvd_compress")


@dataclasses.dataclass(eq=False)
class Watched:
    """A parameter with a hook and its name.

    It knows its backward passes since the last exchange and whether these were all.  It also knows
    the gradient that its exchange has begun with, of which version, at which address.
    """

    parameter: torch.nn.Parameter
    name: str
    passes: int = 0
    is_started: bool = False
    gradient: torch.Tensor | None = None
    version: int = 0
    address: int = 0


def changed_since(everyone: Iterable[Watched]) -> list[torch.nn.Parameter]:
    """Return those whose gradients were written to, or replaced, since their exchange began.

    A gradient in other memory is not known to have other numbers.  Views share their version with
    the whole buffer that they are in.
    """
    return [
        each.parameter
        for each in everyone
        if (gradient := each.gradient) is not None
        and (
            gradient is not each.parameter.grad
            or (
                gradient._version != each.version
                and (gradient.is_sparse or gradient.data_ptr() == each.address)
                and not gradient._is_view()
            )
        )
    ]


class ParameterBinding(Controls):
    """Hands the gradients of one optimizer to a reducer, and writes back what comes.

    Users get it as ``optimizer.compression``: ``stats()``, ``set_epoch(epoch)``,
    ``report_at_exit()``, ``method``, ``step``, ``epoch``.

    Args:
        optimizer: a :class:`CompressedOptimizer`.
        method: the compression method.
        hvd: the module ``horovod.torch``, or another with its functions.
        sums: the user asked for ``op=Sum``.
        engine, node: see :class:`Reducer`.
        seed: for randomness that the ranks share.
        sparse_step: gradients may become sparse tensors.

    Attributes:
        store: what the optimizer knows of its parameters.

    >>> w = torch.nn.Parameter(torch.ones(1000))
    >>> sgd = torch.optim.SGD([w], lr=0.1)
    >>> optimizer = hvd.DistributedOptimizer(sgd, [("w", w)], compression=hvd.TopK(density=0.01))
    >>> w.square().sum().backward()
    >>> optimizer.step()
    >>> optimizer.compression.stats().layers["w"].elements_sent
    10
    """

    def __init__(
        self,
        optimizer: Any,
        method: Compressor,
        hvd: Any,
        *,
        sums: bool,
        engine: Engine,
        node: Node | None,
        seed: int,
        sparse_step: bool,
    ) -> None:
        self.hvd = hvd
        engine = engine if optimizer.process_set.included() else LocalEngine()
        self._is_first = engine.rank == 0 and (node is None or node.place == 0)
        momentum = Momentum(optimizer, method, tells=self._is_first)
        self.store = ParameterStore(optimizer, method, momentum, node)
        #: the loss scale of the step whose gradients came last
        self.last_scale: float | None = None
        #: averages over the ranks of what differs, if they are those of the last step
        self.consolidated: dict[torch.nn.Parameter, State] | None = None
        self._saw_backward = False  # since the last exchange
        self._made_dense: set[torch.nn.Parameter] = set()  # whose gradients came as rows
        self._true_units: list[torch.nn.Parameter] = []  # whose gradients carry no scale
        self._assigned: list[tuple[torch.nn.Parameter, weakref.ref[torch.Tensor]]] = []
        self._is_plain_sgd = torch.optim.SGD in type(optimizer).__bases__
        self._has_decayed: bool | None = None  # None: not known
        self._has_warned = False
        names, groups = optimizer._parameter_names, optimizer._groups
        self.reducer = Reducer(
            method,
            engine,
            store=self.store,
            sums=sums,
            seed=seed,
            groups=None if groups is None else [[names[p] for p in group] for group in groups],
            # Backward begins with the last layers.
            names=list(reversed(names.values())),
            in_place=True,  # a gradient of the user's has been given up, or is a copy
            sparse=sparse_step,
            node=node,
        )
        method.bind(self)

    def __repr__(self) -> str:
        return f"<{self.method!r} of {type(self.store.optimizer).__name__}, step {self.step}>"

    # -- what users call ---------------------------------------------------------------------

    @property
    def method(self) -> Compressor:
        """The compressor in use."""
        return self.reducer.method

    @property
    def step(self) -> int:
        """The number of exchanges so far."""
        return self.reducer.step

    @property
    def epoch(self) -> float | None:
        """The epoch that was announced."""
        return self.reducer.epoch

    @property
    def seed(self) -> int:
        """The seed of random numbers that the ranks share."""
        return self.reducer.seed

    @property
    def engine(self) -> Engine:
        """The engine between the ranks."""
        return self.reducer.engine

    def discard(self) -> None:
        """Drop the gradients of this step instead of taking it, on all ranks: after
        ``loss.backward()`` or ``optimizer.synchronize()``, and instead of ``optimizer.step()``::

            optimizer.compression.keep_undo()  # once, before training
            ...
            if norm > limit:  # the same on all ranks
                optimizer.compression.discard()

        Residuals, velocities and the number of the step are those of before, and gradients are
        zero, as after ``optimizer.zero_grad()``.

        Raises:
            ConfigError: :meth:`keep_undo` was not called.
        """
        if not self.reducer.keeps_undo:
            raise ConfigError(
                "to discard a step takes what waited before it: call "
                "optimizer.compression.keep_undo() once, before training"
            )
        self.store.optimizer.discard()

    def drop(self) -> None:
        """Put the states back, or say that they are not those of before: gradients that were
        exchanged are dropped, and no step was taken."""
        if self.reducer.can_discard:
            self.reducer.discard()
            return
        # After a NaN or Inf most states are those of before.
        if self._has_warned or not any(map(self.store.get, self.store.names())):
            return
        gradients = [p.grad for p, _ in self._assigned if p.grad is not None]
        if all(bool(backend.all_finite(gradient.to_dense())) for gradient in gradients):
            self._has_warned = True
            warnings.warn(
                "gradients were exchanged and are dropped without a step: what was sent of earlier "
                "gradients is lost, and what these have left waits still. Freeze parameters whose "
                "gradients are not wanted (requires_grad_(False)); or call "
                "optimizer.compression.keep_undo() once, before training, and all stays as it was",
                UserWarning,
                stacklevel=3,
            )

    def report_at_exit(self) -> None:
        """Log one line of statistics, on rank 0, when the program ends or drops the optimizer."""
        if self._is_first:
            weakref.finalize(self.store.optimizer, self._report)

    def _report(self) -> None:
        try:
            stats = self.stats()
        except ConfigError:  # the optimizer is gone, and with it the residuals
            stats = Stats(self.reducer.records, self.reducer.clock.times)
        logger.info("%s: %s", self.reducer.compression.name, stats.line())

    # -- the exchange ------------------------------------------------------------------------

    def begin_ready(self) -> None:
        """Begin to exchange the gradients that hooks have found to be ready."""
        ready, self.store.ready = self.store.ready, []
        if ready:
            self.begin(ready)

    def begin(self, watched: Sequence[Watched]) -> None:
        """Begin to exchange gradients as they are now in backward; never waits."""
        for each in watched:
            each.is_started = True
            gradient = each.gradient = each.parameter.grad
            if gradient is not None:
                each.version = gradient._version
                each.address = 0 if gradient.is_sparse else gradient.data_ptr()
        self.exchange_gradients(watched, in_backward=True)

    def exchange_gradients(self, watched: Sequence[Watched], in_backward: bool = False) -> None:
        """Begin to exchange the gradients of one parameter, or of a group; never waits."""
        if not self.reducer.has_begun:
            self._saw_backward = False
        self._saw_backward |= in_backward
        try:
            with self.reducer.clock:
                self._start(watched, in_backward)
        except BaseException:  # the optimizer stays usable
            self.store.optimizer.reset_hooks()
            self.abandon()
            raise

    def _start(self, watched: Sequence[Watched], in_backward: bool) -> None:
        self.consolidated = None
        self.store.optimizer._synchronized = False
        if scaled_passes and (scale := running_scale()) is not None:
            if self.reducer.sparse_results:
                raise ConfigError("sparse_step=True cannot scale losses: leave one of the two out")
            self.store.scale = scale
        gradients, parameters = {}, self.store.parameters
        is_shared = self.reducer.node is not None
        for each in watched:
            p, name = each.parameter, each.name
            if p.grad is None:  # other ranks may have one
                p.grad = self._no_gradient(p)
            elif not in_backward and p.grad.layout is torch.strided and 0 in p.grad.stride():
                p.grad = p.grad.clone()  # they cannot be written to; backward leaves no such
            gradient = p.grad
            # Most are as they should be, and a function for each would take long.
            is_usual = (
                type(gradient) is torch.Tensor
                and gradient.dtype in backend.GRADIENTS
                and gradient.layout is torch.strided
                and gradient.shape == p.shape
                and gradient.device == p.device
                and not is_wrapped(gradient)
            )
            if not is_usual:
                _check_gradient(name, gradient, p)
                if is_shared and gradient.is_sparse:  # the ranks of a node divide dense ones
                    self._made_dense.add(p)
                    gradient = gradient.to_dense()
            if is_shared:
                gradient = self.store.unscaled(gradient, self.store.scale)
            gradients[name] = gradient.detach() if gradient.requires_grad else gradient
            parameters[name] = p
        self.reducer.start_together(gradients)

    def finish(self) -> dict[str, torch.Tensor]:
        """Wait for everything that was started and put the averages into ``p.grad``."""
        self.begin_ready()
        with self.reducer.clock:
            try:
                directions = self.reducer.finish()
            except BaseException:  # the optimizer stays usable
                self.store.optimizer.reset_hooks()
                self._forget()
                raise
            self._assign(directions)
        return directions

    def _assign(self, directions: dict[str, torch.Tensor]) -> None:
        self._assigned.clear()
        taken, multiplied = self.store.taken, self.store.multiplied
        self._true_units.clear()
        for name, direction in directions.items():
            if name not in taken:  # the other ranks of the node have all of it
                taken[name] = Gradient(self.store.parameters[name], False, self.store.known_scale)
            p, is_rows, scale = taken.pop(name)
            if scale is not None:
                if self.store.scale is None:
                    self._true_units.append(p)
                if scale != 1:
                    direction = multiplied(direction, scale)
            if (gradient := p.grad) is not None and direction is gradient:
                self._assigned.append((p, weakref.ref(gradient)))
            else:
                self._assign_gradient(p, direction, is_rows)
        self.last_scale, self.store.scale = self.store.scale, None

    def untouched(self) -> bool:
        """Return whether the gradients are those of the last exchange, which may be clipped."""
        return bool(self._assigned) and all(
            p.grad is not None and p.grad is gradient() for p, gradient in self._assigned
        )

    def abandon(self) -> None:
        """Discard everything in flight: the collectives failed, or a checkpoint was loaded."""
        self.reducer.abandon()
        self._forget()

    def _forget(self) -> None:
        self.store.taken.clear()
        self.store.ready.clear()
        self.store.scale = self._has_decayed = None
        self.consolidated = None

    def _gradient_dtype(self, p: torch.nn.Parameter) -> torch.dtype:
        return gradient_dtype(p, self.store.optimizer._parameter_names[p])

    def _no_gradient(self, p: torch.nn.Parameter) -> torch.Tensor:
        if p not in self.store.sparse and p not in self._made_dense:
            return torch.zeros_like(p, dtype=self._gradient_dtype(p))
        index = torch.empty(1, 0, dtype=torch.int64, device=p.device)
        dtype = self._gradient_dtype(p)
        rows = p.detach().new_empty(0, *p.shape[1:], dtype=dtype)
        return torch.sparse_coo_tensor(index, rows, p.shape, check_invariants=False)

    def _assign_gradient(self, p: Any, direction: torch.Tensor, is_rows: bool) -> None:
        if isinstance(direction, Sparse):
            places = torch.stack(torch.unravel_index(direction.indices, p.shape))
            values = direction.values.to(self._gradient_dtype(p))
            p.grad = torch.sparse_coo_tensor(
                places, values, p.shape, is_coalesced=True, check_invariants=False
            )
            self._assigned.append((p, weakref.ref(p.grad)))
            return
        gradient = p.grad
        if gradient is None:  # a gradient that is under way arrives, or ranks would differ
            p.grad = direction.to(self._gradient_dtype(p))
        elif is_rows:
            p.grad = direction.to(gradient.dtype)
        elif gradient.is_sparse:  # sparse_as_dense: as sparse as it came
            p.grad = direction.to(gradient.dtype).to_sparse(1)
        else:
            # Into its own memory, which may be a part of a larger tensor that others hold.
            gradient.copy_(direction)
        self._assigned.append((p, weakref.ref(p.grad)))

    # -- momentum ----------------------------------------------------------------------------

    def velocity_factor(self, p: torch.nn.Parameter) -> float:
        """Return the velocity that has the effect of a momentum buffer of 1 in plain SGD.  Ours
        follow the average whatever ``op`` is."""
        return self.store.momentum_side.factor(p) / (self.engine.size if self.reducer.sums else 1)

    @contextlib.contextmanager
    def optimizer_step(self) -> Iterator[None]:
        """Hide the parts that have acted already while the user's optimizer steps.  Momentum and
        decay are off.  This package's state is removed, since Adam and others take a state that is
        not empty for their own."""
        self.reducer.forget_undo()
        if self.reducer.sparse_results:
            check_sparse_step(self.store.optimizer, self.method)
        momentum, hidden = self.store.momentum_side, dict[torch.nn.Parameter, State]()
        if not self._is_plain_sgd or self._decays():  # SGD looks at its own entries alone
            groups = self.store.optimizer.param_groups
            hidden = {p: self.store.pop_state(p) for group in groups for p in group["params"]}
        try:
            if momentum.is_taken:
                momentum.decay(hidden, self.store.sparse, self.store.method_for)
            with momentum.switched_off():
                yield
        finally:
            for p, state in hidden.items():
                self.store.set_state(p, state)
        self.store.sample_weights(self.step)

    def _decays(self) -> bool:
        """Whether weight decay is this package's affair, or has been in an earlier step."""
        groups = self.store.optimizer.param_groups
        if not self.store.momentum_side.is_taken:
            return False
        if self._has_decayed is None:
            everyone = (p for group in groups for p in group["params"])
            self._has_decayed = any("decay" in self.store.state_of(p) for p in everyone)
        self._has_decayed |= any(group["weight_decay"] for group in groups)
        return self._has_decayed

    # -- loss scaling, see amp.py ------------------------------------------------------------

    def expect_scale(self, scale: float) -> None:
        """Take ``scale``, from ``unscale_``, for the scale of this step, on a rank that had no
        backward pass to learn it from."""
        if self.store.scale is None and not self.store.taken:
            self.store.scale = scale

    def confirm_scale(self, scale: float) -> None:
        """Prepare gradients that are about to be divided by ``scale``: a rank that had none of its
        own multiplies the averages by it.  Raise ``ConfigError`` if gradients were made with
        another scale."""
        if not self._true_units and self.last_scale is None:
            return
        if self.last_scale is None and not self._saw_backward:  # a rank without gradients
            for p in self._true_units:
                assert p.grad is not None
                p.grad.mul_(scale)
        elif self.last_scale != scale:
            raise ConfigError(
                f"the gradients were made with loss scale {self.last_scale} and are now divided "
                f"by {scale}: use one torch.amp.GradScaler per optimizer, and scaler.scale(loss)"
            )
        self.last_scale = scale


def _check_gradient(name: str, gradient: torch.Tensor, p: torch.nn.Parameter) -> None:
    """Raise unless a gradient can be exchanged and belongs to its parameter."""
    if not gradient.is_sparse:
        backend.check_gradient(gradient)
    if gradient.shape != p.shape or gradient.device != p.device:
        raise ConfigError(
            f"the gradient of {name!r} is {list(gradient.shape)} on {gradient.device}, and the "
            f"parameter {list(p.shape)} on {p.device}: after changing .data of a parameter, set "
            "its .grad to None"
        )
