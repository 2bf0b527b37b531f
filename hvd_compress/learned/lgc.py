"""Learned gradient compression (Abrahamyan, Chen, Bekoulis, Deligiannis; TNNLS 2021)."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context
from hvd_compress.chain import Chain, chain
from hvd_compress.config import check_choice, converted
from hvd_compress.errors import ConfigError
from hvd_compress.learned.aggregators import learned_allreduce, learned_server
from hvd_compress.learned.learning import settled_after
from hvd_compress.meetings import dense_until, leader_top_k
from hvd_compress.methods.chained import OfVelocities
from hvd_compress.schedules import After, Start, as_start, started
from hvd_compress.transforms import fading_memory


@dataclasses.dataclass(frozen=True)
class LGC(OfVelocities, name="lgc"):
    """Send the largest 0.1 %, encoded by an autoencoder that is trained during the first steps.

    For every matrix and larger tensor, on each rank::

        u = m u + g;  v = v + u                            as DGC
        until ``learn``      everything is summed
        from ``learn`` on    a leader chooses where, every rank sends its v there to all, and all
                             ranks make the same step of training
        from ``code`` on     a leader chooses where, the values there are sent as a latent
        v = keep (v - what was decoded) and u = 0 there;  w = w - lr (mean of what was decoded)

    Momentum lives in ``u``, in the place of the optimizer's.  One-dimensional and tiny tensors are
    averaged whole, with momentum afterwards.

    One autoencoder codes the selected values of all tensors, end to end; see ``autoencoder`` below.
    They are one message, so it is sent when the last of these gradients is ready.

    State: ``velocity`` u and ``memory`` v; tensors sent whole have ``velocity`` only.  One tensor
    also has ``autoencoder``, ``first_moment``, ``second_moment`` and ``quality``, equal on all
    ranks.  For ResNet-50 these are 216,677 weights with Adam's moments; with an autoencoder for
    each of its 46 tensors in which enough elements are selected, they are 29.9 million numbers,
    more than the model's 25.6 million parameters:

    >>> from hvd_compress.advisor.shapes import resnet50
    >>> gradients = [np.zeros(shape, np.float32) for shape in resnet50().values()]
    >>> common = LGC().common(gradients[0])
    >>> common["autoencoder"].size, sum(x.size for x in common.values())
    (216677, 650034)
    >>> states = [LGC(autoencoder="per_tensor").init(gradient) for gradient in gradients]
    >>> coded = [state for state in states if "autoencoder" in state]
    >>> len(coded), sum(state[key].size for state in coded for key in common)
    (46, 29901564)

    Sent, in the end: a leader's k packed indices (k = ceil(density * n)) and one number for each
    tensor; k / 4 numbers; and one more for each tensor.

    Options:
        density: fraction of elements to select.
        learn, code: numbers of steps, or ``After("epoch", ...)``; see above.
        settled: when all ranks have the weights of rank 0, like ``code``; ``None``: three steps, or
            an epoch, after that.
        via: "allreduce": latents are averaged.  "server": the leader's latent stands for all, and
            every rank adds its largest values; see ``learned_server``.
        innovation: with "server", the fraction of the selected values that every rank sends beside
            the latent.
        decoders: with "server", their number; ``None`` is one.
        autoencoder: "shared": one for all tensors of a dtype and device.  If fewer than 31 elements
            are selected of all, these are sent as they are.  "per_tensor": one for each tensor, so
            that exchanges overlap with backward; tensors of which fewer than 31 elements are
            selected send these as they are.
        rate: of the autoencoder's training by Adam.
        keep: how much of what decoding gets wrong is tried again, in [0, 1]; see below.
        momentum, nesterov: ``None`` takes the optimizer's.
        masking: u = 0 where elements were sent.
        min_size: tensors with fewer elements are sent whole.

    Warns with ``PoorFit`` if ranks' gradients are not alike, or the autoencoder has not learnt.

    Reference: Abrahamyan, Chen, Bekoulis, Deligiannis, TNNLS 2021.  Differs from it in: Adam
    instead of plain gradient descent, which at a rate of 0.001 does not leave its start within 300
    steps; the values of each tensor are normalised, and what was decoded is scaled to fit.  For the
    first and the last layer in full, as there, use ``partition``.  ``keep=0`` forgets what decoding
    gets wrong, as there: it is lost.  With ``keep=1`` nothing is lost, but what the autoencoder
    cannot express fills the memory until next to nothing else is chosen.
    """

    reference = "Abrahamyan et al., TNNLS 2021"

    density: float = 0.001
    learn: Start = dataclasses.field(default=200, metadata=converted(as_start))
    code: Start = dataclasses.field(default=500, metadata=converted(as_start))
    via: str = "allreduce"
    innovation: float = 0.01
    decoders: int | None = None
    autoencoder: str = "shared"
    rate: float = 0.003
    keep: float = 0.5
    momentum: float | None = None
    nesterov: bool | None = None
    masking: bool = True
    min_size: int = 1024
    settled: Start | None = dataclasses.field(
        default=None, metadata=converted(settled_after, "code")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("via", self.via, ("allreduce", "server"))
        if _length(self.code, self.learn) < _length(self.learn, self.code):
            raise ConfigError(
                f"code={self.code} is before learn={self.learn}: an autoencoder that was not "
                "trained decodes nonsense; let code be greater than learn"
            )
        _ = self._dense, self._server()  # their blocks check the other options

    def template(self, gradient: Array) -> Chain:
        shape = backend_of(gradient).shape(gradient)
        if not self.compresses(shape):
            return self._whole
        return self._learned if self._via.fits(math.prod(shape)) else self._selected

    def chain(self, gradient: Array, context: Context) -> Chain:
        found = self.template(gradient)
        if found is self._whole or started(self.learn, context.step, context.epoch):
            return found
        return self._dense[found]

    @functools.cached_property
    def _feedback(self) -> fading_memory:
        return fading_memory(self.keep)

    @functools.cached_property
    def _via(self) -> learned_allreduce | learned_server:
        options: dict[str, Any] = {
            "density": self.density,
            "start": self.code,
            "settled": self.settled,
            "rate": self.rate,
            "autoencoder": self.autoencoder,
        }
        return learned_allreduce(**options) if self.via == "allreduce" else self._server(**options)

    def _server(self, **options: Any) -> learned_server:
        decoders = 1 if self.decoders is None else self.decoders
        return learned_server(innovation=self.innovation, decoders=decoders, **options)

    @functools.cached_property
    def _learned(self) -> Chain:
        return chain(*self.accumulated(self.masking), via=self._via)

    @functools.cached_property
    def _selected(self) -> Chain:
        via = leader_top_k(self.density)
        return chain(*self.accumulated(self.masking), via=via)

    @functools.cached_property
    def _dense(self) -> dict[Chain, Chain]:
        """A stand-in for a chain until training begins, which keeps the same state."""
        before = self.accumulated(masking=False)
        return {
            found: chain(*before, via=dense_until(self.learn, found.via))
            for found in (self._learned, self._selected)
        }


def _length(start: Start, other: Start) -> float:
    """Steps or epochs until ``start``, 0 if they cannot be compared with those of ``other``."""
    if isinstance(start, After) and isinstance(other, After):
        return start.stage_length if start.unit == other.unit else 0
    return start.stage_length if isinstance(start, After) and other is True else 0
