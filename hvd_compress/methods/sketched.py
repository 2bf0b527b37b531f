"""Sketched-SGD (Ivkin, Rothchild, Ullah, Braverman, Stoica, Arora; NeurIPS 2019)."""

from __future__ import annotations

import dataclasses
import functools
import math

from hvd_compress.aggregators import count_sketch
from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context
from hvd_compress.chain import Chain, chain
from hvd_compress.config import converted
from hvd_compress.methods.chained import OfVelocities
from hvd_compress.schedules import Density, as_density


@dataclasses.dataclass(frozen=True)
class SketchedSGD(OfVelocities, name="sketch"):
    """Send the elements whose average over the ranks is largest, as far as sums of sketches tell.

    For every matrix and larger tensor, on each rank::

        u = m u + g;  v = v + u
        sum the sketches of v;  sum v exactly where the sketch says it is large
        G = the average where that is largest;  v = 0 and u = 0 there;  w = w - lr G

    :class:`DGC` picks what is largest on one rank or another.  Here it is what is largest on
    average, all ranks send the same elements, and traffic does not grow with the number of ranks.
    Momentum lives in ``u``, in the place of the optimizer's.  One-dimensional and tiny tensors are
    averaged whole, with momentum afterwards.

    State: ``velocity`` u and ``residual`` v; tensors sent whole have ``velocity`` only.
    Sent: ``(rows * width + candidates) * k`` values a tensor (k = ceil(density * n)), in two sums.

    Options:
        density: fraction of elements to send, or a schedule.
        rows: of the sketch, an odd number.
        width: columns of the sketch for every element that is sent.
        candidates: elements that are summed exactly for every element that is sent.
        momentum, nesterov: ``None`` takes the optimizer's.
        masking: u = 0 where elements were sent.
        min_size: tensors with fewer elements are sent whole.

    Reference: Ivkin, Rothchild, Ullah, Braverman, Stoica, Arora, NeurIPS 2019.  Differs from it in:
    every tensor has a sketch of its own, and its k largest elements are sent, where the paper has
    one sketch for the whole gradient; where a sketch would not be smaller than the tensor, that is
    summed, without masking, which would turn momentum off.

    The one largest element of two gradients of 1200:

    >>> gradients = [np.zeros((30, 40)), np.zeros((30, 40))]
    >>> gradients[0][3, 4], gradients[1][3, 4] = 5.0, 3.0
    >>> mean = World(SketchedSGD(density=0.001), size=2).exchange(gradients)[0].mean
    >>> np.argwhere(mean).tolist(), mean.max().item()
    ([[3, 4]], 4.0)
    """

    reference = "Ivkin et al., NeurIPS 2019"

    density: Density = dataclasses.field(default=0.005, metadata=converted(as_density))
    rows: int = 5
    width: int = 10
    candidates: int = 10
    momentum: float | None = None
    nesterov: bool | None = None
    masking: bool = True
    min_size: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self._sketched, self._everything, self._whole  # their blocks check the options

    def template(self, gradient: Array) -> Chain:
        compressed = self.compresses(backend_of(gradient).shape(gradient))
        return self._sketched if compressed else self._whole

    def chain(self, gradient: Array, context: Context) -> Chain:
        shape = backend_of(gradient).shape(gradient)
        if not self.compresses(shape):
            return self._whole
        n = math.prod(shape)
        return self._sketched if self._via.count(n, context) < n else self._everything

    @functools.cached_property
    def _via(self) -> count_sketch:
        return count_sketch(self.density, self.rows, self.width, self.candidates)

    @functools.cached_property
    def _sketched(self) -> Chain:
        return chain(*self.accumulated(self.masking), via=self._via)
