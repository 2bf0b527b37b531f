"""0/1 Adam for PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from hvd_compress import optimizers
from hvd_compress.base import Context
from hvd_compress.engines.joining import TensorExchange
from hvd_compress.errors import ConfigError
from hvd_compress.stats import Record

from ..state.optimizer_host import PartnerOptimizer, keep, now_of


class ZeroOneAdam(PartnerOptimizer):
    """Adam that sends one bit per element, and later nothing at all in most steps::

        adam = hvd.ZeroOneAdam(model.parameters(), lr=1e-3, var_freeze_step=20_000)
        optimizer = hvd.DistributedOptimizer(adam, compression=adam.compressor())

    Rounding errors of ``buffer`` are in ``sync.residual`` and ``sync.owner_residual`` of the state.

    >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> adam = hvd.ZeroOneAdam([w], lr=0.1, var_freeze_step=1)
    >>> optimizer = hvd.DistributedOptimizer(adam, compression=adam.compressor())
    >>> for _ in range(2):
    ...     optimizer.zero_grad()
    ...     (w * torch.tensor([0.6, 0.8])).sum().backward()
    ...     optimizer.step()
    >>> optimizer.synchronize_parameters()  # before evaluation or a checkpoint, and at the end
    >>> w.detach()
    tensor([2.8000, 3.8000])
    """

    #: weights of ranks differ between the steps in which they meet
    steps_apart = True

    formula = optimizers.ZeroOneAdam

    _parameter_names: dict[torch.Tensor, str]  # once it is distributed
    _phase: str | None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, and synchronize the parameters where that is due."""
        loss = super().step(closure)
        if self._phase == "sync":
            self._synchronize(self._in_one_bit)
        return loss

    def begin_step(self) -> None:
        binding = self.binding
        # Steps may have been skipped after their exchange: the compression's count is what counts.
        self._phase = None if binding is None else binding.method.phase(binding.step)
        if self._phase in ("local", "sync"):
            self._check_local(binding)

    def update(self, p: torch.Tensor, formula: Any, **flags: bool) -> None:
        alone = self._phase is None
        counted = self.state[p].get("step", 0)
        phase = formula.phases.phase(counted + 1) if alone else self._phase
        is_local = not alone and phase in ("local", "sync")
        super().update(p, formula, frozen=phase != "variance", is_local=is_local)

    @torch.no_grad()
    def synchronize_parameters(self) -> None:
        """Give all ranks the same parameters now, in full precision, residuals included.

        This is a collective: call it on every rank, between steps.  A checkpoint afterwards is the
        same on all ranks, but for residuals of gradients; see ``consolidate_state_dict``.
        """
        if self.binding is not None:
            self._synchronize(self._in_full)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as every optimizer does.  Call :meth:`synchronize_parameters` before,
        since ranks differ in between."""
        states = self.state.values()
        if any(state.get("rate") or "sync.residual" in state for state in states):
            warnings.warn(
                "parameters differ between ranks until they are synchronized: call "
                "optimizer.synchronize_parameters() on every rank before optimizer.state_dict() "
                "and model.state_dict()",
                UserWarning,
                stacklevel=3,
            )
        return super().state_dict()

    def _check_local(self, binding: Any) -> None:
        if binding.last_scale is not None:
            raise ConfigError(
                "local steps and loss scaling do not go together, since a rank alone cannot skip a "
                "step: use bfloat16 or float32, or a later var_freeze_step"
            )
        if binding.store.sparse:
            raise ConfigError(
                "local steps need dense gradients: pass sparse_as_dense=True to "
                "hvd.DistributedOptimizer"
            )

    def _synchronize(self, average: Callable[[dict[Any, Any]], dict[Any, torch.Tensor]]) -> None:
        groups = {p: group for group in self.param_groups for p in group["params"]}
        moved = {p: state for p in groups if "anchor" in (state := self.state.get(p, {}))}
        for p, mean in average(moved).items():
            formula, state = self.formula_of(groups[p]), moved[p]
            w, new = formula.synchronized(p, mean, state, now_of(state))
            keep(p, w, new, state)

    def _in_one_bit(self, states: dict[Any, Any]) -> dict[Any, torch.Tensor]:
        binding, prefix = self.binding, "sync."
        reducer, method, members = binding.reducer, binding.method, {}
        for p, state in states.items():
            own = {key.removeprefix(prefix): x for key, x in state.items() if key[:5] == prefix}
            name, buffer = self._parameter_names[p], state["buffer"]
            engine = reducer.engine
            context = Context(f"buffer.{name}", engine.rank, engine.size, reducer.step)
            chain = method.chain(buffer, context)
            exchange = chain.exchange(buffer, own or method.init(buffer), context)
            record = reducer.records.setdefault(name, Record())  # sent and counted like gradients
            members[p] = TensorExchange(context.name, exchange, record, buffer.nbytes)
        like = next((state["buffer"] for state in states.values()), None)
        outcomes = reducer.run(list(members.values()), like)
        means = {}
        for p, member in members.items():
            outcome = outcomes[member.name]
            states[p].update({prefix + key: x for key, x in outcome.state.items()})
            means[p] = outcome.mean
        return means

    def _in_full(self, states: dict[Any, Any]) -> dict[Any, torch.Tensor]:
        # What owners of shards keep is in units of a sum, and its mean is its share of ours.
        binding, everything = self.binding, {}
        for p, state in states.items():
            rest = [state.pop(k) for k in ("sync.residual", "sync.owner_residual") if k in state]
            everything[p] = state["buffer"] + sum(x.view(p.shape) for x in rest)
        names = self._parameter_names
        means = binding.reducer.average({f"{names[p]}.sync": x for p, x in everything.items()})
        return {p: means[f"{names[p]}.sync"] for p in states}
