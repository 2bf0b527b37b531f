"""Ties a compressor to one distributed optimizer: its parameters, its momentum, its state."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hvd_compress.base import Compressor, Context, Sparse, State
from hvd_compress.errors import ConfigError
from hvd_compress.stats import Record, Stats
from hvd_compress.torch.amp import LossScale
from hvd_compress.torch.engine import HorovodEngine, LocalEngine
from hvd_compress.torch.rows import exchange_rows
from hvd_compress.transforms import momentum_after_averaging

logger = logging.getLogger("hvd_compress")

#: prefix of this package's entries in ``optimizer.state[p]``
PREFIX = "compression."


class Binding:
    """What a compressor needs to know of one optimizer, and the optimizer of its compressor.

    Users meet it as ``optimizer.compression``: ``stats()``, ``set_epoch(epoch)``,
    ``report_at_exit()``, ``method``.

    Args:
        optimizer: made by Horovod's factory, around the user's class.
        method: the compression method.
        hvd: the module ``horovod.torch``.
        sums: the user asked for ``op=Sum``.
    """

    def __init__(self, optimizer: Any, method: Compressor, hvd: Any, sums: bool) -> None:
        self.method = method
        self.epoch: int | None = None
        self.step = 0
        self.seed = 0
        self.records: dict[str, Record] = {}
        self.sparse: set[torch.nn.Parameter] = set()
        #: averages over the ranks of what differs, if they are those of the last step
        self.consolidated: dict[torch.nn.Parameter, State] = {}
        self.is_consolidated = False
        self.loss_scale = LossScale(self)
        self._groups: dict[torch.nn.Parameter, dict[str, Any]] = {}
        self._optimizer = optimizer
        self.hvd = hvd
        self._sums = sums
        self._in_flight: dict[str, torch.nn.Parameter] = {}
        self._deferred: list[list[torch.nn.Parameter]] = []
        self._gradient_norm: float | None = None
        self._local = LocalEngine()
        self._horovod = HorovodEngine(
            hvd, optimizer.process_set, optimizer.gradient_predivide_factor
        )
        self.takes_optimizer_momentum = self._check_momentum()
        method.bind(self)

    # -- what users call ---------------------------------------------------------------------

    def stats(self) -> Stats:
        """Exact bytes so far, by parameter and in total, and the norm of what waits."""
        for p, name in self._optimizer._parameter_names.items():
            residual = self.state_of(p).get("residual")
            if residual is not None:
                norm = torch.linalg.vector_norm(residual, dtype=torch.float64).item()
                self.records.setdefault(name, Record()).residual_norm = norm
        return Stats(self.records)

    def set_epoch(self, epoch: int) -> None:
        """Announce an epoch, for schedules by epoch."""
        self.epoch = int(epoch)

    def report_at_exit(self) -> None:
        """Log one line of statistics when the program ends, on rank 0."""
        import atexit

        if self.engine.rank == 0:
            atexit.register(lambda: logger.info("%s: %s", self.method.name, self.stats().line()))

    # -- the exchange ------------------------------------------------------------------------

    @property
    def engine(self) -> HorovodEngine | LocalEngine:
        """Horovod, or a world of one where Horovod would not reduce."""
        included = self._optimizer.process_set.included()
        return self._horovod if included and self._horovod.size > 1 else self._local

    @property
    def busy(self) -> bool:
        return bool(self._in_flight or self._deferred)

    def start(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Exchange the gradients of one parameter, or of a group, from a hook: never waits."""
        parameters = list(parameters)
        self.consolidated, self.is_consolidated = {}, False
        if self.method.needs_epoch and self.epoch is None:
            raise ConfigError(
                f"{self.method!r} advances by epoch: call optimizer.compression.set_epoch(epoch) "
                "at the start of every epoch"
            )
        for p in parameters:
            if p.grad is None:  # other ranks may have one
                p.grad = self._no_gradient(p)
        if self.method.needs_gradient_norm:
            self._deferred.append(parameters)
        else:
            self._launch(parameters)

    def finish(self) -> None:
        """Wait for everything that was started and put the averages into ``p.grad``."""
        if self._deferred:
            self._gradient_norm = self._norm_of_gradients()
            deferred, self._deferred = self._deferred, []
            for parameters in deferred:
                self._launch(parameters)
            self._gradient_norm = None
        factor = (self.engine.size if self._sums else 1) * self.loss_scale.value
        for name, outcome in self.engine.finish().items():
            p = self._in_flight.pop(name)
            direction, state = outcome.direction, outcome.state
            if p in self.sparse:
                direction, state = self._momentum_of_rows(p, outcome.mean)
            self._set_state(p, state)
            self._assign_gradient(p, direction * factor if factor != 1 else direction)
            self._count(name, outcome.sent)
        self.step += 1
        self.loss_scale.forget()

    def abandon(self) -> None:
        """Forget what is under way: the collectives failed, or a checkpoint was loaded."""
        self._in_flight.clear()
        self._deferred.clear()
        self._horovod.abandon()
        self._local.abandon()
        self.loss_scale.forget()

    def _launch(self, parameters: list[torch.nn.Parameter]) -> None:
        engine, exchanges = self.engine, {}
        for p in parameters:
            name = self._optimizer._parameter_names[p]
            self._in_flight[name] = p
            record = self.records.setdefault(name, Record())
            exchanges[name] = (self._exchange(p, name, record, engine), record)
        engine.start(exchanges)

    def _exchange(self, p: torch.nn.Parameter, name: str, record: Record, engine: Any) -> Any:
        group = self.group_of(p)
        gradient = p.grad.detach()
        context = Context(
            name=name,
            rank=engine.rank,
            size=engine.size,
            step=self.step,
            epoch=self.epoch,
            seed=self.seed,
            momentum=group["momentum"] if self.takes_optimizer_momentum else 0.0,
            nesterov=group["nesterov"] if self.takes_optimizer_momentum else False,
            gradient_norm=self._gradient_norm,
        )
        record.steps += 1
        record.elements += p.numel()
        record.dense_bytes += p.numel() * p.element_size()
        if (scale := self.loss_scale.value) != 1:
            gradient = gradient / scale
        if gradient.is_sparse and not self._optimizer.sparse_as_dense:
            self.sparse.add(p)
            return exchange_rows(gradient, context)
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if self.takes_optimizer_momentum and self.method_option("weight_decay") == "gradient":
            sign = -1 if group["maximize"] else 1
            gradient = gradient.add(p.detach(), alpha=sign * group["weight_decay"])
        state = self.state_of(p)
        if not state:
            state = self.method.init(gradient)
        return self.method.exchange(gradient, state, context)

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
        return torch.linalg.vector_norm(torch.stack(norms)).item() / self.loss_scale.value

    def _momentum_of_rows(self, p: torch.nn.Parameter, mean: torch.Tensor) -> tuple[Any, State]:
        """Momentum after averaging, for gradients that stay sparse on the wire only."""
        group, state = self.group_of(p), self.state_of(p)
        finite = torch.isfinite(mean.values()).all()
        if not self.takes_optimizer_momentum or not group["momentum"] or not finite:
            return mean, state
        gradient = mean.to_dense().view(-1)
        transform = momentum_after_averaging(group["momentum"], group["nesterov"])
        state = {"velocity": torch.zeros_like(gradient), **state}
        direction, state = transform.finish(gradient, state, Context())
        return direction.view(p.shape), state

    def _assign_gradient(self, p: torch.nn.Parameter, direction: torch.Tensor) -> None:
        if p in self.sparse:
            p.grad = direction
        elif p.grad.is_sparse:  # sparse_as_dense: as sparse as it came
            p.grad = direction.to_sparse(1)
        elif p.grad.is_contiguous():
            p.grad.set_(direction)
        else:
            p.grad.copy_(direction)

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
        if not isinstance(optimizer, torch.optim.SGD):
            if own is None:
                self._warn(
                    f"{self.method.name} corrects the momentum of SGD, and {wrapped} has another "
                    f"kind: it gets error feedback without momentum correction. If that is what "
                    f"you want, say so with {type(self.method).__name__}(momentum=0.0)"
                )
            return False
        for group in optimizer.param_groups:
            if group["dampening"]:
                raise ConfigError(
                    f"{self.method.name} takes the optimizer's momentum over and knows no "
                    f"dampening={group['dampening']}; use dampening=0"
                )
            if own is not None and group["momentum"] not in (0, own):
                raise ConfigError(
                    f"two momenta: {group['momentum']} in the optimizer and {own} in "
                    f"{type(self.method).__name__}; leave one of them out"
                )
        momenta = sorted({group["momentum"] for group in optimizer.param_groups})
        if own is None and any(momenta) and self.engine.rank == 0:
            nesterov = any(group["nesterov"] for group in optimizer.param_groups)
            logger.info(
                "momentum %s%s of %s now acts inside %s; the optimizer's own is off during step()",
                ", ".join(map(str, momenta)),
                " (Nesterov)" if nesterov else "",
                wrapped,
                self.method.name,
            )
        return True

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
        if self.takes_optimizer_momentum:
            if self.method_option("weight_decay") != "gradient":
                self._decay(hidden)
            for group in optimizer.param_groups:
                off = {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
                options.append((group, {key: group[key] for key in off}))
                group.update(off)
        try:
            yield
        finally:
            for group, kept in options:
                group.update(kept)
            for p, state in hidden.items():
                if state:
                    self._set_state(p, state)

    def _decay(self, states: dict[torch.nn.Parameter, State]) -> None:
        """q = m q + wd w joins the averaged gradient, as in the authors' released code: weights
        are equal on all ranks, so decay needs no wire and no residual."""
        for p, state in states.items():
            group = self.group_of(p)
            wd = group["weight_decay"]
            if p.grad is None or (not wd and "decay" not in state):
                continue
            m = self.method_option("momentum")
            m = group["momentum"] if m is None else m
            w = p.detach() if not group["maximize"] else -p.detach()
            if "decay" not in state:
                state["decay"] = torch.zeros_like(p).view(-1)
            q = state["decay"].view(p.shape).mul_(m).add_(w, alpha=wd)
            if p.grad.is_sparse:
                p.grad = p.grad.to_dense()
            if group["nesterov"] or self.method_option("nesterov"):
                p.grad.add_(w, alpha=wd).add_(q, alpha=m)
            else:
                p.grad.add_(q)

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

    def per_rank_keys(self, p: torch.nn.Parameter) -> frozenset[str]:
        return frozenset() if p in self.sparse else self.method.per_rank(p.detach())

    def _warn(self, message: str) -> None:
        if self.engine.rank == 0:
            warnings.warn(message, UserWarning, stacklevel=5)

    def rescale_states(self, factor: float) -> None:
        """Multiply what was accumulated; all of it is linear in the gradients."""
        for p in self._optimizer._parameter_names:
            for key, x in self.state_of(p).items():
                if key != "decay":
                    x.mul_(factor)
