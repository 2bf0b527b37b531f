"""EF21 (Richtarik, Sokolov, Fatkhullin; NeurIPS 2021, arXiv 2106.05203)."""

from __future__ import annotations

import dataclasses
import functools

from hvd_compress import codecs
from hvd_compress.chain import Chain, Transform, chain
from hvd_compress.codecs import Codec
from hvd_compress.config import checked, converted, numbers
from hvd_compress.meetings import allgather, dense_until
from hvd_compress.methods.chained import Chained
from hvd_compress.schedules import Density, Start, as_start
from hvd_compress.transforms import ef21, smoothing


@dataclasses.dataclass(frozen=True)
class EF21(Chained, name="ef21"):
    """Send the largest changes of the gradient, and step along an estimate that all ranks share::

        compression=hvd.EF21(density=0.02)

    Each rank computes from its gradient g, with C = top-k::

        send c = C(g - h);   h = h + c
        G = G + sum of what all ranks sent / N;  w = w - lr G

    State: ``estimate`` h, and ``mean_estimate`` G, equal on all ranks.  The optimizer's momentum
    and weight decay act on G.

    Options:
        density, indices: as in all methods.
        values: "float32", "float16", or a codec such as ``natural()``.
        start: the number of first steps that send everything; ``True``: none, with h = 0.
        average: weight of the past, in [0, 1), in a moving average that replaces g.  It reduces the
            noise of minibatches: EF21-SGDM (Fatkhullin, Tyurin, Richtarik, 2023).

    Reference: Richtarik, Sokolov, Fatkhullin, NeurIPS 2021, arXiv 2106.05203.

    >>> world, gradient = World(EF21(density=0.5), size=1), np.array([4.0, 1.0, 0.0, 2.0])
    >>> [world.exchange([gradient])[0].direction.tolist() for step in range(2)]
    [[4.0, 0.0, 0.0, 2.0], [4.0, 1.0, 0.0, 2.0]]
    """

    reference = "Richtarik et al., NeurIPS 2021"

    density: Density = 0.02
    values: str | Codec = "float32"
    start: Start = dataclasses.field(default=True, metadata=converted(as_start))
    average: float = checked(numbers("in [0, 1)", lambda average: 0 <= average < 1), 0.0)
    indices: str = "packed"

    @functools.cached_property
    def blocks(self) -> Chain:
        via = allgather(codecs.top_k(self.density), self.values, indices=self.indices)
        average: tuple[Transform, ...] = (smoothing(self.average),) if self.average else ()
        return chain(*average, ef21(), via=dense_until(self.start, via))
