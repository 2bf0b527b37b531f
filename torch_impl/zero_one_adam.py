"""0/1 Adam, the optimizer (Lu et al., ICLR 2023); its messages: ``methods/zero_one_adam.py``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hvd_compress.errors import ConfigError
from hvd_compress.methods.zero_one_adam import ZeroOneAdamCompression

from .frozen_adam import FrozenAdam, scale_of, start_state, update_parameter
from .partner import loss_of


class ZeroOneAdam(FrozenAdam):
    """Adam that learns its variance at ever fewer steps, and later synchronizes the parameters at
    ever fewer steps::

        adam = hvd.ZeroOneAdam(model.parameters(), lr=1e-3, var_freeze_step=5000)
        optimizer = hvd.DistributedOptimizer(
            adam, named_parameters=model.named_parameters(), compression=adam.compressor()
        )
        ...
        optimizer.synchronize_parameters()  # before evaluation or a checkpoint, and at the end

    Until ``var_freeze_step`` it is Adam on averaged gradients, of which v takes part in variance
    steps only.  Then, on each rank, with v as it is, s = sqrt(v^) + eps and d = 1 - lr
    weight_decay::

        m = beta1 m + (1 - beta1) g          with this rank's own gradient
        a = d a;  u = d u + lr m^;  r = d r + lr
        p = a - u / s

    and where parameters are synchronized::

        u = 1-bit mean of u over the ranks
        p = a = a - u / s;  m^ = u / r;  u = r = 0

    a is what the parameters were at the last synchronization, but for decay: so p is bitwise equal
    on all ranks after each, and differs in between.

    State of a parameter: ``exp_avg`` m, ``exp_avg_sq`` v, ``step``, ``variance_step``; from the
    freeze on also ``anchor`` a, ``buffer`` u, ``rate`` r, and what one bit leaves out of u:
    ``sync.residual`` and ``sync.owner_residual``.

    Args:
        params, lr, betas, eps, weight_decay, bias_correction: as for
            :class:`~hvd_compress.torch.OneBitAdam`.
        var_freeze_step, var_update_scaler, local_step_scaler, local_step_clipper: see
            :class:`~hvd_compress.methods.zero_one_adam.ZeroOneAdamCompression`.

    Differs from the released code in: bias correction, decay that takes no part in momentum, and
    elements without variance, as in ``OneBitAdam``; ranks go back to an anchor instead of
    subtracting what they added, which would leave each with rounding errors of its own.

    Without this package's compression gradients are averaged otherwise, and there are no local
    steps.  Loss scaling ends before the local steps begin: a rank alone cannot skip one.

    Raises:
        ConfigError: an option makes no sense.
    """

    _parameter_names: dict[torch.Tensor, str]  # once it is distributed

    method = ZeroOneAdamCompression
    schedule = ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        var_freeze_step: int = 100_000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32_678,
        local_step_clipper: int = 16,
        bias_correction: bool = True,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            var_freeze_step=var_freeze_step,
            var_update_scaler=var_update_scaler,
            local_step_scaler=local_step_scaler,
            local_step_clipper=local_step_clipper,
            bias_correction=bias_correction,
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, and synchronize the parameters where that is due."""
        loss = loss_of(closure)
        binding = self._binding()
        # Steps may have been skipped after their exchange: the compression's count is what counts.
        phase = "" if binding is None else binding.method.phase(binding.step)
        if phase in ("local", "sync"):
            self._check_local(binding)
        for group in self.param_groups:
            schedule = self.method(**self.compression_options(group))
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = start_state(self, p)
                gradient = p.grad.to_dense() if p.grad.is_sparse else p.grad
                if phase in ("local", "sync"):
                    self._local_step(p, gradient, state, group)
                    continue
                alone = binding is None
                now = schedule.phase(state["step"] + 1) if alone else phase
                update_parameter(p, gradient, state, group, frozen=now != "variance")
        if phase == "sync":
            self._synchronize(self._in_one_bit)
        return loss

    @torch.no_grad()
    def synchronize_parameters(self) -> None:
        """Give all ranks the same parameters now, in full precision, residuals included.

        This is a collective: call it on every rank, between steps.  What is saved afterwards is the
        same on all ranks, but for residuals of gradients; see ``consolidate_state_dict``.
        """
        if self._binding() is not None:
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
        if binding.sparse:
            raise ConfigError(
                "local steps need dense gradients: pass sparse_as_dense=True to "
                "hvd.DistributedOptimizer"
            )

    def _local_step(
        self, p: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        if "anchor" not in state:
            state["anchor"] = p.clone(memory_format=torch.preserve_format)
            state["buffer"], state["rate"] = torch.zeros_like(state["anchor"]), 0.0
        lr, beta1 = group["lr"], group["betas"][0]
        decay = 1 - lr * group["weight_decay"]
        state["step"] += 1
        m = state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
        state["anchor"].mul_(decay)
        state["buffer"].mul_(decay).add_(m, alpha=lr / _bias(state, group))
        state["rate"] = state["rate"] * decay + lr
        p.copy_(state["anchor"] - state["buffer"] / scale_of(state, group))

    def _synchronize(self, average: Callable[[dict[Any, Any]], dict[Any, torch.Tensor]]) -> None:
        groups = {p: group for group in self.param_groups for p in group["params"]}
        moved = {p: state for p in groups if "anchor" in (state := self.state.get(p, {}))}
        for p, mean in average(moved).items():
            state, group = moved[p], groups[p]
            state["anchor"].sub_(mean / scale_of(state, group))
            p.copy_(state["anchor"])
            if state["rate"]:  # else only residuals have moved the parameter
                state["exp_avg"].copy_(mean * (_bias(state, group) / state["rate"]))
            state["buffer"].zero_()
            state["rate"] = 0.0

    def _in_one_bit(self, states: dict[Any, Any]) -> dict[Any, torch.Tensor]:
        binding, prefix = self._binding(), "sync."
        waiting = {}
        for p, state in states.items():
            own = {key.removeprefix(prefix): x for key, x in state.items() if key[:5] == prefix}
            waiting[p] = own or binding.method.init(state["buffer"])
        outcomes = binding.average_buffers({p: s["buffer"] for p, s in states.items()}, waiting)
        for p, outcome in outcomes.items():
            states[p].update({prefix + key: x for key, x in outcome.state.items()})
        return {p: outcome.mean for p, outcome in outcomes.items()}

    def _in_full(self, states: dict[Any, Any]) -> dict[Any, torch.Tensor]:
        # What owners of shards keep is in units of a sum, and its mean is its share of ours.
        binding, everything = self._binding(), {}
        for p, state in states.items():
            rest = [state.pop(k) for k in ("sync.residual", "sync.owner_residual") if k in state]
            everything[p] = state["buffer"] + sum(x.view(p.shape) for x in rest)
        names = self._parameter_names
        means = binding.average({f"{names[p]}.sync": x for p, x in everything.items()})
        return {p: means[f"{names[p]}.sync"] for p in states}


def _bias(state: dict[str, Any], group: dict[str, Any]) -> float:
    return 1 - group["betas"][0] ** state["step"] if group["bias_correction"] else 1.0
