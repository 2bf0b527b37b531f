"""Deep Gradient Compression (Lin, Han, Mao, Wang, Dally; ICLR 2018, arXiv 1712.01887)."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from hvd_compress import codecs
from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context
from hvd_compress.chain import Chain, Transform, chain
from hvd_compress.config import checked, choice, converted, numbers
from hvd_compress.errors import ConfigError
from hvd_compress.meetings import allgather, allreduce
from hvd_compress.methods.chained import OfVelocities, check_min_size
from hvd_compress.methods.rows import checked_rows
from hvd_compress.schedules import Density, as_density
from hvd_compress.transforms import clip_by_local_norm, error_feedback, momentum_after_averaging


@dataclasses.dataclass(frozen=True)
class DGC(OfVelocities, name="dgc"):
    """Send the largest 0.1 % of momentum, keep the rest for later (Lin et al., arXiv 1712.01887)::

        compression=hvd.DGC(density=hvd.warmup_to(0.001, epochs=4), clip_norm=0.25)

    Each rank computes from its gradient g::

        u = m u + g                    momentum correction     (Nesterov: u = m (u + g))
        v = v + u                      accumulation            (Nesterov: v = v + u + g)
        send the top k of |v|;  v = 0 and u = 0 where sent     (momentum factor masking)

    State: ``velocity`` u, ``residual`` v.  One-dimensional tensors keep u and are averaged whole.

    Options:
        density, momentum, nesterov, indices, algorithm, rows: as in all methods.
        masking: momentum factor masking.
        clip_norm: positive, the L2 norm at which the common gradient is clipped, or ``None``.
        weight_decay: "separate", with a buffer of its own, or "gradient", a part of the gradient.
        values: "float32", "float16" or "4bit" on the wire; v keeps the rounding errors.
        min_size: tensors with fewer elements are averaged whole, too.
        small: their form: "float32", "float16", "int8", or "sparse" like all others.

    >>> world = World(DGC(density=0.25, momentum=0.9, min_size=1), size=2)
    >>> world.exchange([np.array([[4.0, 1.0, 0.0, 2.0]]), np.array([[1.0, 0.0, 6.0, 3.0]])])[0].mean
    array([[2., 0., 3., 0.]])
    """

    reference = "Lin et al., ICLR 2018"
    is_steady = True
    presets = {"compact": {"values": "4bit", "indices": "packed", "small": "sparse"}}

    density: Density = dataclasses.field(default=0.001, metadata=converted(as_density))
    momentum: float | None = None
    nesterov: bool | None = None
    masking: bool = choice(True, False)
    clip_norm: float | None = checked(
        numbers("positive, or None", lambda norm: norm > 0, optional=True), None
    )
    weight_decay: str = choice("separate", "gradient")
    values: str = "float32"
    min_size: int = checked(check_min_size, 1024)
    algorithm: str = "allgather"
    indices: str = "packed"
    small: str = choice("float32", "float16", "int8", "sparse")
    rows: str = dataclasses.field(default="whole", metadata=converted(checked_rows))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip_norm is not None and self.weight_decay == "gradient":
            raise ConfigError(
                "clip_norm would clip weight decay, which weight_decay='gradient' makes a part "
                "of the gradient, as well: weight_decay='separate'"
            )
        _ = self._sparse, self._everything, self._whole  # their blocks check the other options

    @classmethod
    def compact(cls, **options: Any) -> DGC:
        """Return the DGC that sends the fewest bytes, "dgc:compact".  It packs indices, rounds
        values to 4 bits, and sends only the largest elements of small tensors.  About 16 bits per
        element sent."""
        return cls(**{**cls.presets["compact"], **options})

    def compresses(self, shape: tuple[int, ...]) -> bool:
        if self.small == "sparse":
            return math.prod(shape) > 1
        return super().compresses(shape)

    def template(self, gradient: Array) -> Chain:
        compressed = self.compresses(backend_of(gradient).shape(gradient))
        return self._sparse if compressed else self._whole

    def chain(self, gradient: Array, context: Context) -> Chain:
        if not self.compresses(backend_of(gradient).shape(gradient)):
            return self._whole
        n = math.prod(backend_of(gradient).shape(gradient))
        k = self._select.count(n, context)
        return self._sparse if k < n else self._everything

    @functools.cached_property
    def _before(self) -> tuple[Transform, ...]:
        return () if self.clip_norm is None else (clip_by_local_norm(self.clip_norm),)

    @functools.cached_property
    def _whole(self) -> Chain:
        after = momentum_after_averaging(self.momentum, self.nesterov)
        if self.small == "int8":
            return chain(*self._before, error_feedback(), after, via=allgather(codecs.linear(8)))
        wire = "float16" if self.small == "float16" else "gradient"
        return chain(*self._before, after, via=allreduce(wire))

    @functools.cached_property
    def _sparse(self) -> Chain:
        via = allgather(self._select, self.values, self.algorithm, self.indices)
        return chain(*self.accumulated(self.masking), via=via)

    @functools.cached_property
    def _select(self) -> codecs.top_k:
        return codecs.top_k(self.density)
