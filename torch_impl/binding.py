"""The binding of a compressor to one distributed optimizer: its parameters, momentum and state."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from hvd_compress.agreement import Terms, listed
from hvd_compress.base import Compressor, Context, Exchange, Outcome, Sparse, State
from hvd_compress.chain import Repeated
from hvd_compress.engines.base import Engine
from hvd_compress.engines.joining import Member
from hvd_compress.engines.local import LocalEngine
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.methods.rows import as_rows, keeps_residual, rows_state
from hvd_compress.reducer import Reducer
from hvd_compress.stats import Record, Stats, norm_of_residual
from hvd_compress.transforms import momentum_after_averaging

from . import backend
from .amp import running_scale
from .momentum import Momentum, check_sparse_step
from .rows import exchange_rows

logger = logging.getLogger("hvd_compress")

#: prefix of this package's entries in ``optimizer.state[p]``
PREFIX = "compression."


@functools.cache
def _prefixed(key: str) -> str:
    return PREFIX + key


class _Gradient(NamedTuple):
    """A gradient in flight: of whom, as sparse rows or not, divided by which loss scale, ``None``
    if the scale stays in the gradient."""

    parameter: torch.nn.Parameter
    is_rows: bool
    scale: float | None


class _Own(Mapping[str, Any]):
    """This package's entries of ``optimizer.state[p]``, without copying them."""

    __slots__ = ("_state",)

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state

    def __getitem__(self, key: str) -> Any:
        return self._state[_prefixed(key)]

    def __iter__(self) -> Iterator[str]:
        return (key.removeprefix(PREFIX) for key in self._state if key.startswith(PREFIX))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Binding(Reducer):
    """The reducer of one optimizer's gradients.

    Users get it as ``optimizer.compression``: ``stats()``, ``set_epoch(epoch)``,
    ``report_at_exit()``, ``method``.

    Args:
        optimizer: a :class:`CompressedOptimizer`.
        method: the compression method.
        hvd: the module ``horovod.torch``, or another with its functions.
        sums: the user asked for ``op=Sum``.
        engine: carries exchanges between the ranks.
        seed: for randomness that the ranks share.
        sparse_step: gradients may become sparse tensors.
    """

    _set_epoch = "optimizer.compression.set_epoch(epoch)"

    def __init__(
        self,
        optimizer: Any,
        method: Compressor,
        hvd: Any,
        sums: bool,
        engine: Engine,
        seed: int,
        sparse_step: bool,
    ) -> None:
        # The optimizer ends when its owner drops it, and with it the exchanges of its gradients,
        # not when the collector comes, which on other ranks may be in another step.
        self._reference, self.hvd = weakref.ref(optimizer), hvd
        self.sparse: set[torch.nn.Parameter] = set()
        #: averages over the ranks of what differs, if they are those of the last step
        self.consolidated: dict[torch.nn.Parameter, State] = {}
        self.is_consolidated = False
        self._scale: float | None = None  # of the step in flight, None as long as unknown
        self._last_scale: float | None = None
        self._saw_backward = False  # since the last exchange
        self._true_units: list[torch.nn.Parameter] = []  # whose gradients carry no scale
        self._stateful: dict[str, bool] = {}
        self._assigned: list[tuple[torch.nn.Parameter, weakref.ref[torch.Tensor]]] = []
        self._is_plain_sgd = torch.optim.SGD in type(optimizer).__bases__
        self._has_decayed: bool | None = None  # None: not known
        self._name_by_id: dict[int, str] = {}  # to hash a parameter takes long
        self._parameters: dict[str, torch.nn.Parameter] = {}
        self._last_list: tuple[list[Any], list[str]] | None = None  # of which parameters, the text
        self._gradients: dict[str, _Gradient] = {}
        self._last_gradients: dict[str, _Gradient] = {}
        self._ready: list[torch.nn.Parameter] = []  # whose exchange has not begun
        included = optimizer.process_set.included()
        super().__init__(
            method,
            engine if included else LocalEngine(),
            sums=sums,
            seed=seed,
            groups=self._names_of_groups(),
            # Backward begins with the last layers.
            names=list(reversed(optimizer._parameter_names.values())),
            in_place=True,  # a gradient of the user's has been given up, or is a copy
            sparse=sparse_step,
        )
        self.momentum_side = Momentum(optimizer, method, tells=self.engine.rank == 0)

    @property
    def _optimizer(self) -> Any:
        if (optimizer := self._reference()) is None:
            raise ConfigError("the optimizer of this compressor is gone: keep a reference to it")
        return optimizer

    def _names_of_groups(self) -> list[list[str]] | None:
        groups = self._optimizer.groups_of_parameters()
        names = self._optimizer._parameter_names
        return None if groups is None else [[names[p] for p in group] for group in groups]

    def __repr__(self) -> str:
        return f"<{self.method!r} of {type(self._optimizer).__name__}, step {self.step}>"

    # -- what users call ---------------------------------------------------------------------

    def stats(self) -> Stats:
        """Return the exact bytes so far and the residuals' norm, by parameter and in total."""
        for p, name in self._optimizer._parameter_names.items():
            if (norm := norm_of_residual(self.state_of(p))) is not None:
                self.records.setdefault(name, Record()).residual_norm = norm
        return Stats(self.records, self.clock.times)

    def report_at_exit(self) -> None:
        """Log one line of statistics, on rank 0, when the program ends or drops the optimizer."""
        if self.engine.rank == 0:
            weakref.finalize(self._optimizer, self._report)

    def _report(self) -> None:
        is_there = self._reference() is not None
        stats = self.stats() if is_there else Stats(self.records, self.clock.times)
        logger.info("%s: %s", self.method.name, stats.line())

    def state_dict(self, *, consolidate: bool = True) -> dict[str, Any]:
        raise UnsupportedError("the state of a compressor is in optimizer.state_dict()")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        raise UnsupportedError("the state of a compressor is in optimizer.load_state_dict()")

    # -- the exchange ------------------------------------------------------------------------

    def take(self, p: torch.nn.Parameter) -> None:
        """Begin to exchange the gradient of a parameter in a hook of backward, as soon as a bucket
        can be sent; never waits."""
        self._ready.append(p)
        # What is known of a scale ends with the hook.
        if self.buckets.is_due(self._name_of(p)) or running_scale() is not None:
            self._begin_ready()
        elif self._current is not None:  # something may be under way
            self._current.poll()

    def _begin_ready(self) -> None:
        ready, self._ready = self._ready, []
        if ready:
            self.exchange_gradients(ready, in_backward=True)

    def exchange_gradients(
        self, parameters: Iterable[torch.nn.Parameter], in_backward: bool = False
    ) -> None:
        """Begin to exchange the gradients of one parameter, or of a group; never waits."""
        if not self._in_flight and not self._deferred:
            self._saw_backward = False
        self._saw_backward |= in_backward
        try:
            with self.clock.running():
                self._start(list(parameters))
        except BaseException:  # the optimizer stays usable
            self._optimizer.reset_hooks()
            self.abandon()
            raise

    def _start(self, parameters: list[torch.nn.Parameter]) -> None:
        self.consolidated, self.is_consolidated = {}, False
        self._optimizer._synchronized = False
        if (scale := running_scale()) is not None:
            if self.sparse_results:
                raise ConfigError("sparse_step=True cannot scale losses: leave one of the two out")
            self._scale = scale
        gradients = {}
        for p in parameters:
            if p.grad is None:  # other ranks may have one
                p.grad = self._no_gradient(p)
            gradient = p.grad
            name = self._name_of(p)
            _check_gradient(name, gradient, p)
            if gradient.requires_grad:
                gradient = gradient.detach()
            self._parameters[name] = p
            gradients[name] = gradient
        self._start_together(gradients)

    def _name_of(self, p: torch.nn.Parameter) -> str:
        if (name := self._name_by_id.get(id(p))) is None:
            name = self._name_by_id[id(p)] = self._optimizer._parameter_names[p]
        return name

    def finish(self) -> dict[str, torch.Tensor]:
        """Wait for everything that was started and put the averages into ``p.grad``.

        Raises:
            MismatchError: the ranks differ in method, options, step or parameters.
        """
        self._begin_ready()
        with self.clock.running():
            return self._finish_and_assign()

    def _finish_and_assign(self) -> dict[str, torch.Tensor]:
        try:
            directions = super().finish()
        except BaseException:  # the optimizer stays usable
            self._optimizer.reset_hooks()
            raise
        self._assigned.clear()
        self._true_units.clear()
        for name, direction in directions.items():
            p, is_rows, scale = self._gradients.pop(name)
            if scale is not None:
                if self._scale is None:
                    self._true_units.append(p)
                if scale != 1:
                    direction = self._multiplied(direction, scale)
            self._assign_gradient(p, direction, is_rows)
        self._last_scale, self._scale = self._scale, None
        return directions

    def untouched(self) -> bool:
        """Return whether the gradients are those of the last exchange, which may be clipped."""
        return bool(self._assigned) and all(
            p.grad is not None and p.grad is gradient() for p, gradient in self._assigned
        )

    def abandon(self) -> None:
        """Discard everything in flight: the collectives failed, or a checkpoint was loaded."""
        super().abandon()
        self._gradients.clear()
        self._ready.clear()
        self._scale = self._has_decayed = None
        self.consolidated, self.is_consolidated = {}, False

    def _terms(self) -> Terms:
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        # Else momentum is the optimizer's own affair, and may be about to be broadcast.
        taken = groups if self.method.takes_momentum else ()
        momenta = [(group.get("momentum"), group.get("nesterov")) for group in taken]
        return {
            "method": repr(self.method),
            "op": "Sum" if self.sums else "Average",
            "gradient_predivide_factor": str(optimizer.gradient_predivide_factor),
            "backward_passes_per_step": str(optimizer.backward_passes_per_step),
            "momentum, nesterov": str(momenta),
            "seed": str(self.seed),
            "step": str(self.step),
            "epoch": str(self.epoch),
            "buckets": self.buckets.digest,
            "parameters": self._listed,
        }

    @property
    def _listed(self) -> list[str]:
        """The parameters with their shapes, and which of them are trained."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        now = [(p.requires_grad, p.shape) for p in parameters]
        if self._last_list is None or self._last_list[0] != now:
            names = self._optimizer._parameter_names
            texts = listed(
                (names[p] if p.requires_grad else f"{names[p]}, frozen,", p.shape)
                for p in parameters
            )
            self._last_list = now, texts
        return self._last_list[1]

    def _for_messages(self, like: Any) -> torch.Tensor:
        return torch.empty(0)  # in host memory, where nothing has to wait

    def _momentum_of(self, name: str) -> tuple[float, bool]:
        return self.momentum_side.of(self._parameters[name])

    def _rate_of(self, name: str) -> Any:
        return self.momentum_side.group_of(self._parameters[name]).get("lr")

    def _circumstances(self) -> Hashable:
        found = super()._circumstances()
        differs = self._scale is not None or self.sparse or self.momentum_side.decays_gradients
        if found is None or differs:
            return None
        groups = map(self.momentum_side.of_group, self._optimizer.param_groups)
        return found, *(nesterov for _, nesterov in groups)

    def _repeated(self, names: Sequence[str], weights: Sequence[int]) -> Repeated | None:
        gradients = [self._in_flight[name] for name in names]
        if any(gradient.is_sparse for gradient in gradients):
            return None
        last, state = [self._last_gradients[name] for name in names], self._optimizer.state
        self._gradients.update(zip(names, last, strict=True))
        # Indexing would make an entry.
        states = [_Own(state.get(each.parameter, {})) for each in last]
        momenta = [self.momentum_side.of(each.parameter)[0] for each in last]
        return Repeated(gradients, states, momenta, weights, self._kept(names[0]))

    def _scale_in(
        self, name: str, method: Compressor, p: torch.nn.Parameter, is_rows: bool
    ) -> float | None:
        """Return by which loss scale a gradient is divided before it is exchanged."""
        # Without a state the scale may stay, and keeps half precisions from underflow.
        may_stay = not (is_rows or self._keeps_state(name, method, p)) and method.homogeneous
        return None if may_stay else self._known_scale()

    def _exchange(self, name: str, gradient: torch.Tensor, context: Context) -> Exchange:
        p = self._parameters[name]
        method = self.method.for_tensor(name, tuple(p.shape))
        is_rows = gradient.is_sparse and not self._optimizer.sparse_as_dense
        if is_rows or self.sparse:
            (self.sparse.add if is_rows else self.sparse.discard)(p)
        scale = self._scale_in(name, method, p, is_rows)
        if scale not in (None, 1):
            half = gradient.dtype in (torch.float16, torch.bfloat16)
            gradient = (gradient.float() if half else gradient) / scale
        self._gradients[name] = self._last_gradients[name] = _Gradient(p, is_rows, scale)
        if is_rows:
            return self._exchange_rows(p, gradient, context)
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if self.momentum_side.decays_gradients:
            group = self.momentum_side.group_of(p)
            sign = -1 if group["maximize"] else 1
            alpha = sign * group["weight_decay"] / (context.size if self.sums else 1)
            gradient = gradient.add(p.detach(), alpha=alpha)
        state, expected = self.state_of(p), self._expected(name, method, gradient)
        if not expected.keys() <= state.keys():  # the first step, or its owner has cleared it
            state = {**method.init(gradient), **state}
        own = {key: state[key] for key in expected}
        self._check_state(name, gradient, own, expected)
        state |= self._homes.hand(name, lambda: method.common(gradient))
        return method.exchange(gradient, state, context)

    def _exchange_rows(
        self, p: torch.nn.Parameter, gradient: torch.Tensor, context: Context
    ) -> Exchange:
        """Exchange the gradient of an embedding: rows are clipped like all gradients, sent as the
        method's ``rows`` says, and take momentum after averaging."""
        clipped, method, state = self._clip_rows(p, gradient, context), self.method_for(p), {}
        rows = as_rows(method.rows_at(context))
        if rows.keeps_residual:
            state = self.state_of(p)
            if "residual" not in state:
                state |= rows_state(method, p.detach())
        outcome = yield from exchange_rows(clipped, context, rows, state.get("residual"))
        mean, sent, state = outcome.mean, outcome.sent, self.state_of(p) | outcome.state
        momentum, nesterov = context.momentum, context.nesterov
        if not momentum or not torch.isfinite(mean.values()).all():
            return Outcome(mean, sent, state)
        dense = backend.widen(mean.to_dense())
        transform = momentum_after_averaging(momentum, nesterov)
        velocity = state.get("velocity", torch.zeros_like(dense))
        direction, new = transform.finish(dense, {"velocity": velocity}, Context())
        return Outcome(mean, sent, state | new, direction.view(p.shape))

    def method_for(self, p: torch.nn.Parameter) -> Compressor:
        return self.method.for_tensor(self._optimizer._parameter_names[p], tuple(p.shape))

    def _no_gradient(self, p: torch.nn.Parameter) -> torch.Tensor:
        if p not in self.sparse:
            return torch.zeros_like(p)
        index = torch.empty(1, 0, dtype=torch.int64, device=p.device)
        return torch.sparse_coo_tensor(
            index, p.detach().new_empty(0, *p.shape[1:]), p.shape, check_invariants=False
        )

    def _norm(self, gradients: Mapping[str, torch.Tensor]) -> float:
        parts = [g.coalesce().values() if g.is_sparse else g for g in gradients.values()]
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in parts]
        norms = [norm.to(norms[0].device) for norm in norms]
        return torch.linalg.vector_norm(torch.stack(norms)).item() / self._known_scale()

    def _size(self, array: torch.Tensor) -> int:
        return array.numel()

    def _extent(self, name: str, gradient: torch.Tensor) -> tuple[int, int]:
        return gradient.numel(), gradient.numel() * gradient.element_size()

    def _clip_rows(
        self, p: torch.nn.Parameter, gradient: torch.Tensor, context: Context
    ) -> torch.Tensor:
        method = self.method_for(p)
        template = method.template(gradient[0].to_dense())
        rows = gradient.coalesce()
        values = rows.values()
        for transform in template.transforms:
            if transform.needs_gradient_norm:
                values, _ = transform.update(values, {}, context)
        return torch.sparse_coo_tensor(
            rows.indices(), values, gradient.shape, is_coalesced=True, check_invariants=False
        )

    def _assign_gradient(self, p: Any, direction: torch.Tensor, is_rows: bool) -> None:
        if isinstance(direction, Sparse):
            p.grad = _as_coo(direction, p)
            self._assigned.append((p, weakref.ref(p.grad)))
            return
        gradient = p.grad
        if gradient is None:  # a gradient that is under way arrives, or ranks would differ
            p.grad = direction.to(p.dtype)
        elif is_rows:
            p.grad = direction.to(gradient.dtype)
        elif gradient.is_sparse:  # sparse_as_dense: as sparse as it came
            p.grad = direction.to(gradient.dtype).to_sparse(1)
        elif direction is not gradient:
            # Into its own memory, which may be a part of a larger tensor that others hold.
            gradient.copy_(direction)
        self._assigned.append((p, weakref.ref(p.grad)))

    _finishing = "optimizer.step() or optimizer.synchronize()"

    def is_under_way(self) -> bool:
        return bool(self._ready) or super().is_under_way()

    # -- momentum ----------------------------------------------------------------------------

    @property
    def takes_optimizer_momentum(self) -> bool:
        """Return whether the momentum of the optimizer acts inside the exchange."""
        return self.momentum_side.is_taken

    def velocity_factor(self, p: torch.nn.Parameter) -> float:
        """Return the velocity that has the effect of a momentum buffer of 1 in plain SGD.  Ours
        follow the average whatever ``op`` is."""
        return self.momentum_side.factor(p) / (self.engine.size if self.sums else 1)

    def forget_groups(self) -> None:
        """Update after parameter groups have changed."""
        self._name_by_id.clear()
        self.momentum_side.forget_groups()

    @contextlib.contextmanager
    def optimizer_step(self) -> Iterator[None]:
        """Hide, while the user's optimizer steps, what has acted already: momentum and decay are
        off, and this package's state is removed, since Adam and others take a state that is not
        empty for their own."""
        groups = self._optimizer.param_groups
        if self.sparse_results:
            check_sparse_step(self._optimizer, self.method)
        if self._is_plain_sgd and not self._decays():  # SGD looks at its own entries alone
            with self.momentum_side.switched_off():
                yield
            return
        hidden = {p: self._pop_state(p) for group in groups for p in group["params"]}
        try:
            if self.momentum_side.is_taken:
                self.momentum_side.decay(hidden, self.sparse, self.method_for)
            with self.momentum_side.switched_off():
                yield
        finally:
            for p, state in hidden.items():
                if state:
                    self._set_state(p, state)

    def _decays(self) -> bool:
        """Whether weight decay is this package's affair, or has been in an earlier step."""
        groups = self._optimizer.param_groups
        if not self.momentum_side.is_taken:
            return False
        if self._has_decayed is None:
            everyone = (p for group in groups for p in group["params"])
            self._has_decayed = any("decay" in self.state_of(p) for p in everyone)
        self._has_decayed |= any(group["weight_decay"] for group in groups)
        return self._has_decayed

    # -- loss scaling, see amp.py ------------------------------------------------------------

    def _known_scale(self) -> float:
        return 1.0 if self._scale is None else self._scale

    def _keeps_state(self, name: str, method: Compressor, p: torch.nn.Parameter) -> bool:
        if name not in self._stateful:
            like = p.detach()
            self._stateful[name] = bool(method.init(like) or method.common(like))
        return self._stateful[name]

    @property
    def last_scale(self) -> float | None:
        """Of the step whose gradients came last."""
        return self._last_scale

    def expect_scale(self, scale: float) -> None:
        """Take ``scale``, from ``unscale_``, for the scale of this step, on a rank that had no
        backward pass to learn it from."""
        if self._scale is None and not self._gradients:
            self._scale = scale

    def confirm_scale(self, scale: float) -> None:
        """Prepare gradients that are about to be divided by ``scale``: a rank that had none of its
        own multiplies the averages by it.  Raise ``ConfigError`` if gradients were made with
        another scale."""
        if not self._true_units and self._last_scale is None:
            return
        if self._last_scale is None and not self._saw_backward:  # a rank without gradients
            for p in self._true_units:
                assert p.grad is not None
                p.grad.mul_(scale)
        elif self._last_scale != scale:
            raise ConfigError(
                f"the gradients were made with loss scale {self._last_scale} and are now divided "
                f"by {scale}: use one torch.amp.GradScaler per optimizer, and scaler.scale(loss)"
            )
        self._last_scale = scale

    # -- state -------------------------------------------------------------------------------

    def state_of(self, p: torch.nn.Parameter) -> State:
        """Return this package's entries of ``optimizer.state[p]``."""
        state = self._optimizer.state.get(p, {})
        return {
            key.removeprefix(PREFIX): value
            for key, value in state.items()
            if isinstance(key, str) and key.startswith(PREFIX)
        }

    def _names(self) -> Iterable[str]:
        self._parameters = {name: p for p, name in self._optimizer._parameter_names.items()}
        return self._parameters

    def _state_of(self, name: str) -> State:
        return self.state_of(self._parameters[name])

    def _keep(self, name: str, state: State) -> None:
        self._set_state(self._parameters[name], state)

    def _set_state(self, p: torch.nn.Parameter, state: State) -> None:
        if state:
            own = self._optimizer.state[p]
            for key, x in state.items():
                own[_prefixed(key)] = x

    def _pop_state(self, p: torch.nn.Parameter) -> State:
        state = self.state_of(p)
        for key in state:
            del self._optimizer.state[p][PREFIX + key]
        if p in self._optimizer.state and not self._optimizer.state[p]:
            del self._optimizer.state[p]
        return state

    def average_buffers(
        self, tensors: dict[torch.nn.Parameter, torch.Tensor], states: dict[Any, State]
    ) -> dict[torch.nn.Parameter, Outcome]:
        """Average arrays that are not gradients between steps, sent and counted like gradients, for
        methods that are a chain.  This is a collective."""
        engine, names, members = self.engine, self._optimizer._parameter_names, []
        for p, x in tensors.items():
            record = self.records.setdefault(names[p], Record())
            context = Context(f"buffer.{names[p]}", engine.rank, engine.size, self.step)
            chain = self.method.chain(x, context)
            exchange = chain.exchange(x, states[p], context)
            members.append(Member(context.name, exchange, record, x.nbytes))
        outcomes = self._run(members, next(iter(tensors.values()), None))
        return {p: outcomes[f"buffer.{names[p]}"] for p in tensors}

    def per_rank_keys(self, p: torch.nn.Parameter, is_sparse: bool | None = None) -> frozenset[str]:
        """Return the keys of a parameter's state under which ranks differ; ``is_sparse``: its
        gradients are rows, if that is not known from its last one."""
        method = self.method_for(p)
        if p in self.sparse if is_sparse is None else is_sparse:
            return frozenset({"residual"} if keeps_residual(method) else ())
        return method.per_rank(p.detach())


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


def _as_coo(direction: Sparse, p: torch.Tensor) -> torch.Tensor:
    """Return the sparse gradient of ``p``, of any number of dimensions."""
    places = torch.stack(torch.unravel_index(direction.indices, p.shape))
    values = direction.values.to(p.dtype)
    return torch.sparse_coo_tensor(
        places, values, p.shape, is_coalesced=True, check_invariants=False
    )
