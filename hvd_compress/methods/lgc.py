"""Learned gradient compression (Abrahamyan, Chen, Bekoulis, Deligiannis; TNNLS 2021)."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context
from hvd_compress.chain import Chain, chain
from hvd_compress.config import checked, choice, converted
from hvd_compress.errors import ConfigError
from hvd_compress.meetings import dense_until, leader_top_k
from hvd_compress.methods.chained import OfVelocities, check_min_size
from hvd_compress.methods.lgc_aggregators import learned_allreduce, learned_server
from hvd_compress.methods.lgc_learning import settled_after
from hvd_compress.schedules import After, Start, as_start, started
from hvd_compress.transforms import fading_memory


@dataclasses.dataclass(frozen=True)
class LGC(OfVelocities, name="lgc"):
    """Send the largest 0.1 % as the latent of an autoencoder that is trained in the first steps::

        compression=hvd.LGC(learn=200, code=500)

    Velocities are accumulated as by :class:`~hvd_compress.DGC`.  Everything is summed until
    ``learn``. From then on all ranks train on the values that a leader chooses.  From ``code``
    on they send these values as a latent of a quarter as many numbers.

    State: ``velocity``, ``memory``; one tensor has the autoencoder and Adam's moments.

    Options:
        density, momentum, nesterov, masking, min_size: as in :class:`~hvd_compress.DGC`.
        learn, code: numbers of steps, or ``After("epoch", ...)``; ``learn`` comes first.
        settled: when all have rank 0's weights; ``None``: three steps or an epoch later.
        via: "allreduce", which averages latents, or "server": the leader's stands for all.
        innovation, decoders: with "server", the part of values sent too, and their number.
        rate: of the training by Adam, in (0, 1].
        keep: the part of decoding errors that is tried again, in [0, 1].

    Reference: Abrahamyan, Chen, Bekoulis, Deligiannis, TNNLS 2021.

    >>> LGC(learn=20, code=100).common(np.zeros((200, 200), np.float32))["autoencoder"].size
    216677
    """

    reference = "Abrahamyan et al., TNNLS 2021"

    density: float = 0.001
    learn: Start = dataclasses.field(default=200, metadata=converted(as_start))
    code: Start = dataclasses.field(default=500, metadata=converted(as_start))
    via: str = choice("allreduce", "server")
    innovation: float = 0.01
    decoders: int | None = None
    rate: float = 0.003
    keep: float = 0.5
    momentum: float | None = None
    nesterov: bool | None = None
    masking: bool = choice(True, False)
    min_size: int = checked(check_min_size, 1024)
    settled: Start | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "settled", settled_after(self.settled, self.code))
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
