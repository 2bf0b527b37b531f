"""Ties a compressor to one distributed optimizer: its parameters, its momentum, its state."""

from __future__ import annotations

import contextlib
import logging
import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from hvd_compress.agreement import Terms, listed
from hvd_compress.base import Compressor, Context, Outcome, Sparse, State
from hvd_compress.engines.base import Engine, LocalEngine
from hvd_compress.errors import CompressionError, ConfigError
from hvd_compress.integrations.optimizers import (
    another_kind,
    check_one_momentum,
    check_partner,
    moved,
)
from hvd_compress.stats import Record, Stats, norm_of_residual
from hvd_compress.transforms import momentum_after_averaging

from . import backend
from .amp import running_scale
from .rows import exchange_rows

logger = logging.getLogger("hvd_compress")


class _Journey(NamedTuple):
    """An exchange under way: of whom, as sparse rows or not, divided by which loss scale, ``None``
    if the scale stays in the gradient."""

    parameter: torch.nn.Parameter
    is_rows: bool
    scale: float | None


#: prefix of this package's entries in ``optimizer.state[p]``
PREFIX = "compression."


class Binding:
    """What a compressor needs to know of one optimizer, and the optimizer of its compressor.

    Users meet it as ``optimizer.compression``: ``stats()``, ``set_epoch(epoch)``,
    ``report_at_exit()``, ``method``.

    Args:
        optimizer: a :class:`CompressedOptimizer`.
        method: the compression method.
        hvd: the module ``horovod.torch``, or another with its functions.
        sums: the user asked for ``op=Sum``.
        engine: carries exchanges between the ranks.
        seed: for randomness that the ranks share.
    """

    def __init__(
        self, optimizer: Any, method: Compressor, hvd: Any, sums: bool, engine: Engine, seed: int
    ) -> None:
        self.method = method
        self.epoch: float | None = None
        self.step = 0
        self.seed = seed
        self.records: dict[str, Record] = {}
        self.sparse: set[torch.nn.Parameter] = set()
        #: averages over the ranks of what differs, if they are those of the last step
        self.consolidated: dict[torch.nn.Parameter, State] = {}
        self.is_consolidated = False
        self._scale: float | None = None  # of the step under way, None as long as unknown
        self._last_scale: float | None = None
        self._saw_backward = False  # since the last exchange
        self._true_units: list[torch.nn.Parameter] = []  # whose gradients carry no scale
        self._groups: dict[torch.nn.Parameter, dict[str, Any]] = {}
        self._complete: set[torch.nn.Parameter] = set()  # states with all keys of the method
        self._stateful: dict[torch.nn.Parameter, bool] = {}
        self._assigned: dict[torch.nn.Parameter, weakref.ref[torch.Tensor]] = {}
        self._optimizer = optimizer
        self.hvd = hvd
        self._sums = sums
        self._in_flight: dict[str, _Journey] = {}
        self._deferred: list[list[torch.nn.Parameter]] = []
        self._gradient_norm: float | None = None
        self._local = LocalEngine()
        self._shared = engine
        self._agrees = False  # the ranks have begun to compare terms in this step
        if engine.is_collective:
            self._agree()
            self.engine.finish()
            self._agrees = False
        self.takes_optimizer_momentum = self._check_momentum()
        method.bind(self)

    def __repr__(self) -> str:
        return f"<{self.method!r} of {type(self._optimizer).__name__}, step {self.step}>"

    # -- what users call ---------------------------------------------------------------------

    def stats(self) -> Stats:
        """Exact bytes so far, by parameter and in total, and the norm of what waits."""
        for p, name in self._optimizer._parameter_names.items():
            if (norm := norm_of_residual(self.state_of(p))) is not None:
                self.records.setdefault(name, Record()).residual_norm = norm
        return Stats(self.records)

    def set_epoch(self, epoch: float) -> None:
        """Announce an epoch, or a part of one such as 2.5, for schedules by epoch."""
        self.epoch = float(epoch)

    def report_at_exit(self) -> None:
        """Log one line of statistics when the program ends, on rank 0."""
        import atexit

        if self.engine.rank == 0:
            atexit.register(lambda: logger.info("%s: %s", self.method.name, self.stats().line()))

    # -- the exchange ------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """Between ranks, or in a world of one where Horovod would not reduce."""
        included = self._optimizer.process_set.included()
        return self._shared if included and self._shared.size > 1 else self._local

    def start(self, parameters: Iterable[torch.nn.Parameter], in_backward: bool = False) -> None:
        """Exchange the gradients of one parameter, or of a group; never waits."""
        if not self._in_flight and not self._deferred:
            self._saw_backward = False
        self._saw_backward |= in_backward
        try:
            self._start(list(parameters))
        except BaseException:  # the optimizer stays usable
            self._optimizer.reset_hooks()
            self.abandon()
            raise

    def _start(self, parameters: list[torch.nn.Parameter]) -> None:
        self.consolidated, self.is_consolidated = {}, False
        self._optimizer._synchronized = False
        if (scale := running_scale()) is not None:
            self._scale = scale
        if self.method.needs_epoch and self.epoch is None:
            raise ConfigError(
                f"the density of {self.method.name} goes by epochs: call "
                "optimizer.compression.set_epoch(epoch) at the start of every epoch"
            )
        self._agree()
        for p in parameters:
            if p.grad is None:  # other ranks may have one
                p.grad = self._no_gradient(p)
        if self.method.needs_gradient_norm:
            self._deferred.append(parameters)
        else:
            self._launch(parameters)

    def finish(self) -> None:
        """Wait for everything that was started and put the averages into ``p.grad``.

        Raises:
            MismatchError: the ranks differ in method, options, step or parameters.
        """
        try:
            self._agree()  # other ranks may have started something
            if self._deferred:
                self._gradient_norm = self._norm_of_gradients()
                deferred, self._deferred = self._deferred, []
                for parameters in deferred:
                    self._launch(parameters)
                self._gradient_norm = None
            outcomes = self.engine.finish()
        except BaseException:  # the optimizer stays usable
            self._optimizer.reset_hooks()
            self.abandon()
            raise
        if outcomes.keys() != self._in_flight.keys():
            raise CompressionError(f"lost on the way: {self._in_flight.keys() - outcomes.keys()}")
        self._assigned.clear()
        self._true_units.clear()
        for name, outcome in outcomes.items():
            p, is_rows, scale = self._in_flight.pop(name)
            direction, state = outcome.direction, outcome.state
            if is_rows:
                direction, state = self._momentum_of_rows(p, outcome.mean)
            self._set_state(p, state)
            factor = (scale or 1) * (self.engine.size if self._sums and outcome.additive else 1)
            if scale is not None and self._scale is None:
                self._true_units.append(p)
            self._assign_gradient(p, direction * factor if factor != 1 else direction, is_rows)
            self._count(name, outcome.sent)
        self.step += 1
        self._agrees = False
        self._last_scale, self._scale = self._scale, None

    def untouched(self) -> bool:
        """Whether the gradients are those that the last exchange left, clipped perhaps."""
        return bool(self._assigned) and all(
            p.grad is not None and p.grad is gradient() for p, gradient in self._assigned.items()
        )

    def abandon(self) -> None:
        """Forget what is under way: the collectives failed, or a checkpoint was loaded."""
        self._in_flight.clear()
        self._deferred.clear()
        self._shared.abandon()
        self._local.abandon()
        self._scale = None
        self._agrees = False
        self._complete.clear()
        self.consolidated, self.is_consolidated = {}, False

    def _agree(self) -> None:
        """Begin to compare with the other ranks, once a step."""
        if self._agrees:
            return
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        # Else momentum is the optimizer's own affair, and may be about to be broadcast.
        taken = groups if self.method.takes_momentum else ()
        momenta = [(group.get("momentum"), group.get("nesterov")) for group in taken]
        terms: Terms = {
            "method": repr(self.method),
            "op": "Sum" if self._sums else "Average",
            "gradient_predivide_factor": str(optimizer.gradient_predivide_factor),
            "backward_passes_per_step": str(optimizer.backward_passes_per_step),
            "momentum, nesterov": str(momenta),
            "seed": str(self.seed),
            "step": str(self.step),
            "epoch": str(self.epoch),
            "parameters": self._listed,
        }
        self.engine.agree(terms, torch.empty(0))  # in host memory, where nothing has to wait
        self._agrees = True

    @property
    def _listed(self) -> list[str]:
        """The parameters with their shapes, and which of them are trained."""
        names = self._optimizer._parameter_names
        return listed(
            (names[p] if p.requires_grad else f"{names[p]}, frozen,", p.shape)
            for group in self._optimizer.param_groups
            for p in group["params"]
        )

    def _launch(self, parameters: list[torch.nn.Parameter]) -> None:
        engine, exchanges = self.engine, {}
        for p in parameters:
            name = self._optimizer._parameter_names[p]
            record = self.records.setdefault(name, Record())
            exchanges[name] = (self._exchange(p, name, record, engine), record)
        engine.start(exchanges)

    def _exchange(self, p: torch.nn.Parameter, name: str, record: Record, engine: Any) -> Any:
        group = self.group_of(p)
        gradient = p.grad.detach()
        momentum, nesterov = self.momentum_of(group)
        context = Context(
            name=name,
            rank=engine.rank,
            size=engine.size,
            step=self.step,
            epoch=self.epoch,
            seed=self.seed,
            momentum=momentum,
            nesterov=nesterov,
            gradient_norm=self._gradient_norm,
            sums=self._sums,
        )
        record.steps += 1
        record.elements += p.numel()
        record.dense_bytes += p.numel() * p.element_size()
        is_rows = gradient.is_sparse and not self._optimizer.sparse_as_dense
        (self.sparse.add if is_rows else self.sparse.discard)(p)
        # Where nothing waits, the scale may stay, and keeps half precisions from underflow.
        may_stay = not (is_rows or self._keeps_state(p)) and self.method_for(p).homogeneous
        scale = None if may_stay else self._known_scale()
        if scale not in (None, 1):
            half = gradient.dtype in (torch.float16, torch.bfloat16)
            gradient = (gradient.float() if half else gradient) / scale
        self._in_flight[name] = _Journey(p, is_rows, scale)
        if is_rows:
            return exchange_rows(self._clip_rows(p, gradient, context), context)
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if self.takes_optimizer_momentum and self.method_option("weight_decay") == "gradient":
            sign = -1 if group["maximize"] else 1
            alpha = sign * group["weight_decay"] / (engine.size if self._sums else 1)
            gradient = gradient.add(p.detach(), alpha=alpha)
        state = self.state_of(p)
        if p not in self._complete:
            state = {**self.method_for(p).init(gradient), **state}
            self._complete.add(p)
        return self.method_for(p).exchange(gradient, state, context)

    def method_for(self, p: torch.nn.Parameter) -> Compressor:
        return self.method.for_tensor(self._optimizer._parameter_names[p], tuple(p.shape))

    def _no_gradient(self, p: torch.nn.Parameter) -> torch.Tensor:
        if p not in self.sparse:
            return torch.zeros_like(p)
        index = torch.empty(1, 0, dtype=torch.int64, device=p.device)
        return torch.sparse_coo_tensor(
            index, p.detach().new_empty(0, *p.shape[1:]), p.shape, check_invariants=False
        )

    def _norm_of_gradients(self) -> float:
        gradients = (p.grad for group in self._deferred for p in group)
        parts = [g.coalesce().values() if g.is_sparse else g for g in gradients]
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in parts]
        norms = [norm.to(norms[0].device) for norm in norms]
        return torch.linalg.vector_norm(torch.stack(norms)).item() / self._known_scale()

    def _clip_rows(
        self, p: torch.nn.Parameter, gradient: torch.Tensor, context: Context
    ) -> torch.Tensor:
        method = self.method_for(p)
        template = getattr(method, "template", lambda _: method)(gradient[0].to_dense())
        rows = gradient.coalesce()
        values = rows.values()
        for transform in getattr(template, "transforms", ()):
            if transform.needs_gradient_norm:
                values, _ = transform.update(values, {}, context)
        return torch.sparse_coo_tensor(
            rows.indices(), values, gradient.shape, is_coalesced=True, check_invariants=False
        )

    def _momentum_of_rows(self, p: torch.nn.Parameter, mean: torch.Tensor) -> tuple[Any, State]:
        """Momentum after averaging, for gradients that stay sparse on the wire only."""
        group, state = self.group_of(p), self.state_of(p)
        finite = torch.isfinite(mean.values()).all()
        momentum, nesterov = self.momentum_of(group)
        if not momentum or not finite:
            return mean, state
        gradient = backend.widen(mean.to_dense())
        transform = momentum_after_averaging(momentum, nesterov)
        state = {"velocity": torch.zeros_like(gradient), **state}
        direction, state = transform.finish(gradient, state, Context())
        return direction.view(p.shape), state

    def _assign_gradient(self, p: Any, direction: torch.Tensor, is_rows: bool) -> None:
        direction = direction.to(p.grad.dtype)
        if is_rows:
            p.grad = direction
        elif p.grad.is_sparse:  # sparse_as_dense: as sparse as it came
            p.grad = direction.to_sparse(1)
        elif p.grad.is_contiguous():
            p.grad.set_(direction)
        else:
            p.grad.copy_(direction)
        self._assigned[p] = weakref.ref(p.grad)

    def _count(self, name: str, sent: Any) -> None:
        if isinstance(sent, Sparse):
            sent = sent.values
        count = sent.values().numel() if sent.is_sparse else sent.numel()
        self.records[name].elements_sent += count

    # -- momentum and weight decay -----------------------------------------------------------

    def _check_momentum(self) -> bool:
        """Whether the optimizer's momentum moves into the compressor; says so once."""
        if not self.method.takes_momentum:
            return False
        optimizer, own = self._optimizer, self.method_option("momentum")
        wrapped = type(optimizer).__name__
        if not isinstance(optimizer, torch.optim.SGD) and own is None:
            self._warn(another_kind(self.method, wrapped))
        if not isinstance(optimizer, torch.optim.SGD):
            return False
        momenta = sorted({group["momentum"] for group in optimizer.param_groups})
        if own is None and any(momenta) and self.engine.rank == 0:
            nesterov = any(group["nesterov"] for group in optimizer.param_groups)
            logger.info("%s", moved(self.method, momenta, nesterov, wrapped))
        return True

    def momentum_of(self, group: dict[str, Any]) -> tuple[float, bool]:
        """(momentum, nesterov) that act inside the exchange, or beside it on rows and decay."""
        if not self.takes_optimizer_momentum:
            return 0.0, False
        own, nesterov = self.method_option("momentum"), self.method_option("nesterov")
        return (
            group["momentum"] if own is None else own,
            group["nesterov"] if nesterov is None else nesterov,
        )

    def velocity_factor(self, p: torch.nn.Parameter) -> float:
        """The velocity that acts as a momentum buffer of plain SGD does, per unit of that: Nesterov
        velocities have a factor m, ours follow the average whatever ``op`` is, and its sign."""
        group = self.group_of(p)
        momentum, nesterov = self.momentum_of(group)
        factor = momentum if nesterov else 1.0 if momentum else 0.0
        return factor * (-1 if group["maximize"] else 1) / (self.engine.size if self._sums else 1)

    def method_option(self, option: str) -> Any:
        return getattr(self.method, option, None)

    @contextlib.contextmanager
    def optimizer_step(self) -> Iterator[None]:
        """While the user's optimizer steps: momentum and decay that acted already are off, and
        this package's state is out of sight, since Adam and others take a state that is not empty
        for their own."""
        optimizer = self._optimizer
        hidden = {
            p: self._pop_state(p) for group in optimizer.param_groups for p in group["params"]
        }
        options = []
        try:
            if self.takes_optimizer_momentum:
                self._decay(hidden)
                for group in optimizer.param_groups:
                    off = {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
                    options.append((group, {key: group[key] for key in off}))
                    group.update(off)
            yield
        finally:
            for group, kept in options:
                group.update(kept)
            for p, state in hidden.items():
                if state:
                    self._set_state(p, state)

    def _decay(self, states: dict[torch.nn.Parameter, State]) -> None:
        """q = m q + wd w joins the averaged gradient, as in the authors' released code: weights
        are equal on all ranks, so decay needs no wire and no residual.  Beside momentum that is a
        moving average, which does not add up, it is wd w."""
        in_gradient = self.method_option("weight_decay") == "gradient"
        for p, state in states.items():
            group = self.group_of(p)
            wd = group["weight_decay"]
            if p.grad is None or (not wd and "decay" not in state):
                continue
            if in_gradient and p not in self.sparse:
                continue  # rows are exchanged without decay
            m, nesterov = self.momentum_of(group)
            w = p.detach() if not group["maximize"] else -p.detach()
            if p.grad.is_sparse:
                p.grad = p.grad.to_dense()
            if self.method_for(p).averages_momentum:
                p.grad.add_(w, alpha=wd)
                continue
            if "decay" not in state:
                state["decay"] = p.detach().new_zeros(p.numel())
            q = state["decay"].view(p.shape).mul_(m).add_(w, alpha=wd)
            if nesterov:
                p.grad.add_(w, alpha=wd).add_(q, alpha=m)
            else:
                p.grad.add_(q)

    # -- loss scaling, see amp.py ------------------------------------------------------------

    def _known_scale(self) -> float:
        return 1.0 if self._scale is None else self._scale

    def _keeps_state(self, p: torch.nn.Parameter) -> bool:
        if p not in self._stateful:
            self._stateful[p] = bool(self.method_for(p).init(p.detach()))
        return self._stateful[p]

    @property
    def last_scale(self) -> float | None:
        """Of the step whose gradients came last."""
        return self._last_scale

    def expect_scale(self, scale: float) -> None:
        """A rank without a backward pass learns the scale of the step from ``unscale_``."""
        if self._scale is None and not self._in_flight:
            self._scale = scale

    def confirm_scale(self, scale: float) -> None:
        """What the last exchange left is about to be divided by ``scale``."""
        if not self._true_units and self._last_scale is None:
            return
        if self._last_scale is None and not self._saw_backward:  # a rank without gradients
            for p in self._true_units:
                p.grad.mul_(scale)
        elif self._last_scale != scale:
            raise ConfigError(
                f"the gradients were made with loss scale {self._last_scale} and are now divided "
                f"by {scale}: use one torch.amp.GradScaler per optimizer, and scaler.scale(loss)"
            )
        self._last_scale = scale

    # -- state -------------------------------------------------------------------------------

    def group_of(self, p: torch.nn.Parameter) -> dict[str, Any]:
        if not self._groups:
            self._groups = {p: g for g in self._optimizer.param_groups for p in g["params"]}
        return self._groups[p]

    def forget_groups(self) -> None:
        """Parameter groups have changed."""
        self._groups.clear()

    def state_of(self, p: torch.nn.Parameter) -> State:
        """This package's entries of ``optimizer.state[p]``."""
        state = self._optimizer.state.get(p, {})
        return {
            key.removeprefix(PREFIX): value
            for key, value in state.items()
            if isinstance(key, str) and key.startswith(PREFIX)
        }

    def _set_state(self, p: torch.nn.Parameter, state: State) -> None:
        if state:
            self._optimizer.state[p].update({PREFIX + key: x for key, x in state.items()})

    def _pop_state(self, p: torch.nn.Parameter) -> State:
        state = self.state_of(p)
        for key in state:
            del self._optimizer.state[p][PREFIX + key]
        if p in self._optimizer.state and not self._optimizer.state[p]:
            del self._optimizer.state[p]
        return state

    def average(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A collective: the mean over the ranks, by name; on every rank the same names."""
        if self.engine.size == 1:
            return {name: x.clone() for name, x in tensors.items()}
        options = {"op": self.hvd.Average, "process_set": self._optimizer.process_set}
        handles = {
            name: self.hvd.allreduce_async(x, name=f"hvd_compress.average.{name}", **options)
            for name, x in tensors.items()
        }
        return {name: self.hvd.synchronize(handle) for name, handle in handles.items()}

    def average_buffers(
        self, tensors: dict[torch.nn.Parameter, torch.Tensor], states: dict[Any, State]
    ) -> dict[torch.nn.Parameter, Outcome]:
        """A collective between steps: what is no gradient, but travels and counts like one; for
        methods that are a chain."""
        engine, names, exchanges = self.engine, self._optimizer._parameter_names, {}
        for p, x in tensors.items():
            record = self.records.setdefault(names[p], Record())
            context = Context(f"meet.{names[p]}", engine.rank, engine.size, self.step)
            chain = self.method.chain(x, context)  # type: ignore[attr-defined]
            exchanges[context.name] = (chain.exchange(x, states[p], context), record)
        engine.start(exchanges)
        outcomes = engine.finish()
        return {p: outcomes[f"meet.{names[p]}"] for p in tensors}

    def per_rank_keys(self, p: torch.nn.Parameter) -> frozenset[str]:
        return frozenset() if p in self.sparse else self.method_for(p).per_rank(p.detach())

    def _warn(self, message: str) -> None:
        if self.engine.rank == 0:
            warnings.warn(message, UserWarning, stacklevel=6)


def check_group(method: Compressor, optimizer: Any, group: dict[str, Any]) -> None:
    """Raise if the options of a parameter group do not go with the method's momentum."""
    check_partner(method, optimizer, group)
    if not method.takes_momentum:
        return
    check_one_momentum(method, group.get("momentum", 0))
    if isinstance(optimizer, torch.optim.SGD) and group["dampening"]:
        raise ConfigError(
            f"{method.name} takes the optimizer's momentum over and knows no "
            f"dampening={group['dampening']}; use dampening=0"
        )
