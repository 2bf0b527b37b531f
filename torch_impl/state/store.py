"""The parameters as an optimizer of PyTorch knows them: their states, momentum and rates."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hvd_compress.agreement import OPTIMIZER, SAMPLED_EVERY, WEIGHTS, Terms, listed
from hvd_compress.base import Compressor, Context, Exchange, Outcome, State
from hvd_compress.errors import ConfigError, PayloadError
from hvd_compress.methods.rows import Rows, as_rows, keeps_residual, rows_state
from hvd_compress.methods.rows import exchange_rows as exchange
from hvd_compress.reduce import Store
from hvd_compress.reduce.nodes import Node, pieces_of
from hvd_compress.reduce.store import Looks, check_state
from hvd_compress.requests import Sum
from hvd_compress.transforms import momentum_after_averaging

from .. import backend
from .momentum import Momentum

#: prefix of this package's entries in ``optimizer.state[p]``
PREFIX = "compression."
#: options of optimizers that say how a step is computed, not what it is
_WAYS = {"foreach", "fused", "capturable", "differentiable"}
#: how many tensors, and elements of each, ranks compare after some steps
_TENSORS, _ELEMENTS = 8, 2
_NO_STATE: dict[str, Any] = {}


@functools.cache
def _prefixed(key: str) -> str:
    return PREFIX + key


def per_rank_of(method: Compressor, p: torch.Tensor, is_sparse: bool) -> frozenset[str]:
    """Return the keys of a parameter's state under which ranks differ, by the method of this
    parameter; ``is_sparse``: its gradients are rows."""
    if is_sparse:
        return frozenset({"residual"} if keeps_residual(method) else ())
    return method.per_rank(p.detach())


class Gradient(NamedTuple):
    """A gradient in flight: of whom, as sparse rows or not, divided by which loss scale, ``None``
    if the scale stays in the gradient."""

    parameter: torch.nn.Parameter
    is_rows: bool
    scale: float | None


class ParameterStore(Store):
    """The states of one optimizer's parameters, in ``optimizer.state[p]``.

    Args:
        optimizer: a :class:`CompressedOptimizer`.
        method: the compression method.
        momentum: the side of the optimizer that momentum and weight decay are on.
        node: whose ranks share the parameters' states, each with those of its parts.

    Attributes:
        sparse: the parameters whose last gradient was rows.
        scale: the loss scale of the step in flight, ``None`` as long as unknown.
        parameters: by name.
        taken: the gradients in flight, by name.
    """

    set_epoch_call = "optimizer.compression.set_epoch(epoch)"
    finish_call = "optimizer.step() or optimizer.synchronize()"
    keep_undo_call = "optimizer.compression.keep_undo()"

    def __init__(
        self, optimizer: Any, method: Compressor, momentum: Momentum, node: Node | None = None
    ) -> None:
        # The optimizer ends when its owner drops it, and with it the exchanges of its gradients,
        # not when the collector comes, which on other ranks may be in another step.
        self._reference = weakref.ref(optimizer)
        self.method, self.momentum_side, self.node = method, momentum, node
        self.sparse: set[torch.nn.Parameter] = set()
        self.scale: float | None = None
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self.taken: dict[str, Gradient] = {}
        self._last: dict[str, Gradient] = {}
        self._looks = Looks()
        self._stateful: dict[str, bool] = {}
        self._sample: Terms = {}
        self._last_list: tuple[list[Any], list[str]] | None = None  # of which parameters, the text
        #: watched parameters whose gradients are there, and whose exchange has not begun
        self.ready: list[Any] = []

    @property
    def optimizer(self) -> Any:
        if (optimizer := self._reference()) is None:
            raise ConfigError("the optimizer of this compressor is gone: keep a reference to it")
        return optimizer

    def is_waiting(self) -> bool:
        return bool(self.ready)

    # -- states ------------------------------------------------------------------------------

    def state_of(self, p: torch.nn.Parameter) -> State:
        """Return this package's entries of ``optimizer.state[p]``."""
        state = self.optimizer.state.get(p, {})
        return {
            key.removeprefix(PREFIX): value
            for key, value in state.items()
            if isinstance(key, str) and key.startswith(PREFIX)
        }

    def set_state(self, p: torch.nn.Parameter, state: State) -> None:
        """Put entries into ``optimizer.state[p]``."""
        if state:
            own = self.optimizer.state[p]
            for key, x in state.items():
                own[_prefixed(key)] = x

    def pop_state(self, p: torch.nn.Parameter) -> State:
        """Take this package's entries out of ``optimizer.state[p]``, and return them."""
        state, everyones = self.state_of(p), self.optimizer.state
        for key in state:
            del everyones[p][PREFIX + key]
        if p in everyones and not everyones[p]:
            del everyones[p]
        return state

    def use(self, method: Compressor) -> None:
        for name in self.names():
            self.pop_state(self.parameters[name])
        self.forget(method)

    def forget(self, method: Compressor) -> None:
        """Forget what was known of gradients under another method."""
        self.method, self._looks = method, Looks()
        self._stateful.clear()

    def names(self) -> Iterable[str]:
        self.parameters = {name: p for p, name in self.optimizer._parameter_names.items()}
        return self.parameters

    def get(self, name: str) -> State:
        return self.state_of(self.parameters[name])

    def keep(self, name: str, state: State) -> None:
        self.set_state(self.parameters[name], state)

    def put_back(self, name: str, state: State) -> None:
        self.pop_state(self.parameters[name])
        self.set_state(self.parameters[name], state)

    def state_for(self, name: str, gradient: torch.Tensor, method: Compressor) -> State:
        state, expected = self.get(name), self._looks.expected(name, gradient, method)
        if not expected.keys() <= state.keys():  # the first step, or its owner has cleared it
            state = {**method.init(gradient), **state}
        own = {key: state[key] for key in expected}
        check_state(name, gradient, own, expected)
        return own

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """Return the part of a parameter, or of what is as large, that this rank has states of."""
        whole, node = x.detach(), self.node
        return whole if node is None else pieces_of(whole, node.ranks)[node.place]

    def method_for(self, p: torch.nn.Parameter, x: torch.Tensor | None = None) -> Compressor:
        """Return the method of a parameter, or of a part ``x`` of it."""
        shape = tuple(p.shape if x is None else x.shape)
        return self.method.for_tensor(self.optimizer._parameter_names[p], shape)

    def per_rank(self, p: torch.nn.Parameter) -> frozenset[str]:
        """Return the keys of a parameter's state under which ranks differ."""
        own = self.own(p)
        return per_rank_of(self.method_for(p, own), own, p in self.sparse)

    # -- gradients ---------------------------------------------------------------------------

    def prepared(self, name: str, gradient: torch.Tensor, context: Context) -> torch.Tensor:
        """Divide by the loss scale, and add the weight decay that belongs into the gradient."""
        p, optimizer = self.parameters[name], self.optimizer
        is_rows = gradient.is_sparse and not optimizer.sparse_as_dense
        if is_rows or self.sparse:
            (self.sparse.add if is_rows else self.sparse.discard)(p)
        scale = self._scale_in(name, p, is_rows)
        if self.node is None:
            gradient = self.unscaled(gradient, scale)
        self.taken[name] = self._last[name] = Gradient(p, is_rows, scale)
        if is_rows:
            return gradient
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if self.momentum_side.decays_gradients:
            group = self.momentum_side.group_of(p)
            sign = -1 if group["maximize"] else 1
            alpha = sign * group["weight_decay"] / (context.size if context.sums else 1)
            gradient = gradient.add(self.own(p), alpha=alpha)
        return gradient

    def unscaled(self, gradient: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Return a gradient divided by the loss scale."""
        if scale in (None, 1):
            return gradient
        half = gradient.dtype in (torch.float16, torch.bfloat16)
        return (gradient.float() if half else gradient) / scale

    def _scale_in(self, name: str, p: torch.nn.Parameter, is_rows: bool) -> float | None:
        """Return the loss scale that a gradient is divided by before it is exchanged."""
        # Without a state the scale may stay, and keeps half precisions from 0.  But the ranks of a
        # node add up before, and one without a backward pass knows no scale.
        if not is_rows and self.node is None:
            method = self.method.for_tensor(name, tuple(p.shape))
            if name not in self._stateful:
                like = p.detach()
                self._stateful[name] = bool(method.init(like) or method.common(like))
            if not self._stateful[name] and method.homogeneous:
                return None
        return self.known_scale

    @property
    def known_scale(self) -> float:
        """The loss scale, or 1."""
        return 1.0 if self.scale is None else self.scale

    def rows(self, name: str, gradient: torch.Tensor, context: Context) -> Exchange | None:
        if not gradient.is_sparse:
            return None
        return self._exchange_rows(self.parameters[name], gradient, context)

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

    def extent(self, name: str, gradient: torch.Tensor) -> tuple[int, int]:
        return gradient.numel(), gradient.numel() * gradient.element_size()

    def norm(self, gradients: Mapping[str, torch.Tensor]) -> float:
        parts = [g.coalesce().values() if g.is_sparse else g for g in gradients.values()]
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in parts]
        norms = [norm.to(norms[0].device) for norm in norms]
        norm = torch.linalg.vector_norm(torch.stack(norms)).item() if norms else 0.0
        if self.node is not None:
            total = self.node.ask(Sum(torch.tensor([norm * norm], dtype=torch.float64)))
            return total.sqrt().item()
        return norm / self.known_scale

    def of_bucket(
        self, names: Sequence[str], gradients: Sequence[torch.Tensor]
    ) -> tuple[Sequence[Mapping[str, torch.Tensor]], str, Sequence[float]] | None:
        if True in [gradient.is_sparse for gradient in gradients]:
            return None
        last, state = [self._last[name] for name in names], self.optimizer.state
        self.taken.update(zip(names, last, strict=True))
        # Indexing would make an entry.
        states = [state.get(each.parameter, _NO_STATE) for each in last]
        return states, PREFIX, self.momentum_side.of_all([each.parameter for each in last])

    # -- the optimizer -----------------------------------------------------------------------

    def momentum(self, name: str) -> tuple[float, bool]:
        return self.momentum_side.of(self.parameters[name])

    def rate(self, name: str) -> Any:
        return self.momentum_side.group_of(self.parameters[name]).get("lr")

    def circumstances(self) -> Hashable:
        if self.scale is not None or self.sparse or self.momentum_side.decays_gradients:
            return None
        groups = map(self.momentum_side.of_group, self.optimizer.param_groups)
        return tuple(nesterov for _, nesterov in groups)

    def terms(self, own: Terms) -> Terms:
        optimizer, groups = self.optimizer, self.optimizer.param_groups
        change = optimizer._change_of_groups()
        # Else momentum is the optimizer's own affair, and may be about to be broadcast.
        taken = groups if self.method.takes_momentum else ()
        momenta = [(group.get("momentum"), group.get("nesterov")) for group in taken]
        return {
            **own,
            "gradient_predivide_factor": str(optimizer.gradient_predivide_factor),
            "backward_passes_per_step": str(optimizer.backward_passes_per_step),
            "momentum, nesterov": str(momenta),
            "parameters": self._listed,
            **({} if change is None else {"param_groups": change}),
        }

    def numbers(self) -> Terms:
        """Return the options of each parameter group that decide about steps, as text: learning
        rate, weight decay, momentum, betas and others.  A sample of the weights is there, too."""
        optimizer = self.optimizer
        keys = sorted(optimizer.defaults.keys() - _WAYS)
        texts = [{key: _text(group.get(key)) for key in keys} for group in optimizer.param_groups]
        options = [", ".join(f"{key}={x}" for key, x in own.items() if x) for own in texts]
        return {OPTIMIZER: options, **self._sample}

    def sample_weights(self, step: int) -> None:
        """Look at some elements of some weights after a step, others each time, for the comparison
        in the next one.  During backward weights may be each rank's own, as with SAM."""
        optimizer = self.optimizer
        if getattr(optimizer, "steps_apart", False):  # 0/1 Adam's ranks, between two meetings
            return
        self._sample = {}
        if step % SAMPLED_EVERY != 1:
            return
        trained = [p for p in optimizer.known_parameters if p.requires_grad and p.numel()]
        first, places, elements = step // SAMPLED_EVERY * _TENSORS, [], []
        for i in range(min(_TENSORS, len(trained))):
            p = trained[(first + i) % len(trained)]
            for place in (j * (p.numel() - 1) for j in range(_ELEMENTS)):
                x = p.detach()[tuple(map(int, np.unravel_index(place, p.shape)))]
                places.append(f"{optimizer._parameter_names[p]}[{place}]")
                elements.append((x.abs() if x.is_complex() else x).double())
        if elements:
            device = elements[0].device
            values = torch.stack([x.to(device) for x in elements]).tolist()
            pairs = zip(places, values, strict=True)
            self._sample = {WEIGHTS: [f"{place} = {x!r}" for place, x in pairs]}

    @property
    def _listed(self) -> list[str]:
        """The parameters with their shapes, and which of them are trained."""
        parameters = self.optimizer.known_parameters
        now = [(p.requires_grad, p.shape) for p in parameters]
        if self._last_list is None or self._last_list[0] != now:
            names = self.optimizer._parameter_names
            texts = listed(
                (names[p] if p.requires_grad else f"{names[p]}, frozen,", p.shape)
                for p in parameters
            )
            self._last_list = now, texts
        return self._last_list[1]

    def for_messages(self, like: Any) -> torch.Tensor:
        return torch.empty(0)  # in host memory, where nothing has to wait


def _text(value: Any) -> str:
    """Return an option with floats in 9 digits; nothing of tensors in a GPU's memory, for which the
    host would have to wait."""
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 and value.device.type == "cpu" else ...
    if isinstance(value, float):
        return f"{value:.9g}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_text, value))})"
    return str(value) if value is None or isinstance(value, bool | int | str) else ""


def exchange_rows(
    gradient: torch.Tensor, context: Context, rows: Rows, residual: torch.Tensor | None = None
) -> Exchange:
    """Average a sparse COO tensor, the gradient of ``Embedding(sparse=True)``; the outcome's
    ``mean`` is sparse and coalesced.

    Duplicate rows are merged before they are sent, and frames hold raw bytes, so any dtype is
    possible where nothing has to wait.  A rank without a gradient sends no rows.

    Args:
        gradient: sparse in its first dimension, dense in the others.
        rows: what is sent.
        residual: of the whole matrix, flat, if ``rows.keeps_residual``; it is changed in place.
    """
    merged = gradient.coalesce()
    if merged.sparse_dim() != 1:
        raise PayloadError(
            f"sparse gradients must be rows of a matrix (sparse_dim 1), got {merged.sparse_dim()};"
            " pass sparse_as_dense=True to hvd.DistributedOptimizer"
        )
    n, width = gradient.shape[0], gradient.shape[1:].numel()
    indices = merged.indices()[0]
    values = merged.values().reshape(indices.numel(), width)
    table = None if residual is None else residual.view(n, width)

    def merge(places: torch.Tensor, each: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.sparse_coo_tensor(
            places[None], each, (n, width), check_invariants=False
        ).coalesce()
        return total.indices()[0], total.values()

    waiting = None if table is None else table[indices]
    found = yield from exchange(
        rows, indices, values, waiting=waiting, n=n, context=context, merge=merge
    )
    state = {}
    if residual is not None and table is not None and found.left is not None:
        table[indices] = found.left
        state = {"residual": residual}
    mean = torch.sparse_coo_tensor(
        found.indices[None],
        found.values.reshape(-1, *gradient.shape[1:]) if width else found.values,
        gradient.shape,
        is_coalesced=True,
        check_invariants=False,
    )
    return Outcome(mean, found.sent, state)
