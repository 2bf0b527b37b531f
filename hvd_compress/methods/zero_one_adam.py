"""What 0/1 Adam sends (Lu, Li, Zhang, De Sa, He; ICLR 2023, arXiv 2202.06009)."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from hvd_compress.aggregators import allreduce, alltoall
from hvd_compress.backend import backend_of
from hvd_compress.base import Array, Context, Exchange, Outcome, State, Sum
from hvd_compress.chain import Chain, chain
from hvd_compress.codecs import scaled_sign
from hvd_compress.config import check_choice
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.methods._chained import Chained
from hvd_compress.transforms import error_feedback


@dataclasses.dataclass(frozen=True)
class ZeroOneAdamCompression(Chained, name="zero_one_adam"):
    """Gradients in full where Adam's variance learns from them, in one bit elsewhere, and later
    none at all for most steps.

    Half of 0/1 Adam: the other half is the optimizer, ``hvd_compress.torch.ZeroOneAdam``, whose
    ``compressor()`` makes this with the options that fit.  Steps count from 1:

    * until ``var_freeze_step``, every ``var_interval``-th step sums the gradient, "variance"; the
      others send it in one bit an element, with error feedback, "one_bit".  ``var_interval`` is 1
      at first, and doubles after every ``var_update_scaler`` variance steps;
    * then gradients stay on their rank, "local", and every ``local_interval``-th step, "meet", the
      optimizer averages what the ranks have gone since, in one bit an element.
      ``local_interval`` doubles after every ``local_step_scaler`` steps, up to
      ``local_step_clipper``.

    State: ``residual`` and ``owner_residual`` of the gradients; they wait while gradients are
    summed, since Adam's variance is that of a gradient.

    Options:
        var_freeze_step, var_update_scaler, local_step_scaler, local_step_clipper: the optimizer's.
        norm: "l1" or "l2": see :class:`OneBitAdamCompression`.
        min_size: tensors with fewer elements are summed whole, whenever they are sent.

    Without the local steps, for PyTorch only: a graph of TensorFlow would need a branch for each.
    """

    reference = "Lu et al., ICLR 2023"

    var_freeze_step: int = 100_000
    var_update_scaler: int = 16
    local_step_scaler: int = 32_678
    local_step_clipper: int = 16
    norm: str = "l1"
    min_size: int = 1024

    partner = "ZeroOneAdam"

    def __post_init__(self) -> None:
        for name in (
            *("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper"),
        ):
            value: Any = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a number of steps, 1 or more; got {value!r}")
        if not isinstance(self.min_size, int) or self.min_size < 0:
            raise ConfigError(f"min_size must be a number of elements; got {self.min_size!r}")
        check_choice("norm", self.norm, ("l1", "l2"))

    def phase(self, step: int) -> str:
        """ "variance", "one_bit", "local" or "meet"; ``step`` counts from 1."""
        if step <= self.var_freeze_step:
            return "variance" if is_variance_step(step, self.var_update_scaler) else "one_bit"
        doublings = (step - self.var_freeze_step - 1) // self.local_step_scaler
        interval = min(self.local_step_clipper, 2 ** min(doublings, 62))
        return "local" if step % interval else "meet"

    def chain(self, gradient: Array, context: Context) -> Chain:
        """For what travels in one bit."""
        n = math.prod(backend_of(gradient).shape(gradient))
        return self._one_bit if n >= self.min_size else self._whole

    def exchange(self, gradient: Array, state: State, context: Context) -> Exchange:
        if not isinstance(context.step, int):
            raise UnsupportedError(
                "0/1 Adam decides at every step what to send, and a graph of TensorFlow cannot: "
                "use OneBitAdam there"
            )
        phase = self.phase(context.step + 1)
        if phase == "one_bit":
            return (yield from self.chain(gradient, context).exchange(gradient, state, context))
        if phase == "variance":
            outcome = yield from self._whole.exchange(gradient, {}, context)
            return outcome._replace(state=state)
        xp = backend_of(gradient)
        nothing = yield Sum(xp.zeros(0, xp.widen(gradient)))  # of which engines send nothing
        return Outcome(gradient, nothing, state)

    @functools.cached_property
    def _one_bit(self) -> Chain:
        return chain(error_feedback(), via=alltoall(scaled_sign(self.norm)))

    @functools.cached_property
    def _whole(self) -> Chain:
        return chain(via=allreduce())


def is_variance_step(step: int, updates: int) -> bool:
    """Whether ``step``, from 1, is a multiple of the interval of then, which doubles after so many
    ``updates``: 1..16, 18, 20..48, 52, 56..112, 120 ... for 16."""
    last, interval = 0, 1
    while True:
        first = (last // interval + 1) * interval
        last = first + (updates - 1) * interval
        if step <= last:
            return step >= first and step % interval == 0
        interval *= 2
