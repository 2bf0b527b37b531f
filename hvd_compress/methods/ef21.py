"""EF21 (Richtarik, Sokolov, Fatkhullin; NeurIPS 2021, arXiv 2106.05203)."""

from __future__ import annotations

import dataclasses
import functools

from hvd_compress import operators
from hvd_compress.chain import Chain, Transform, chain
from hvd_compress.codecs import Codec
from hvd_compress.config import converted, is_number
from hvd_compress.errors import ConfigError
from hvd_compress.meetings import allgather, dense_until
from hvd_compress.methods.chained import Chained
from hvd_compress.schedules import Density, Start, as_start
from hvd_compress.transforms import ef21, smoothing


@dataclasses.dataclass(frozen=True)
class EF21(Chained, name="ef21"):
    """Send the largest changes of the gradient, add them to an estimate that all ranks share.

    On each rank, for C = top-k::

        send c = C(g - h);   h = h + c
        G = G + sum of what all ranks sent / N

    The optimizer steps along G, the average of all h; its momentum and weight decay act there.

    State: ``estimate`` h, and ``mean_estimate`` G, equal on all ranks.  Sent: k values and k packed
    indices a tensor.  Where gradients are exact, it converges to the minimum itself with a constant
    step, which error feedback does only as the step shrinks; see ``transforms/ef21.py``, and
    :func:`hvd_compress.studies.step_sizes.ef21_step_size`.

    Options:
        density: fraction of elements to send, or a schedule.
        values: "float32", "float16", or a codec such as ``natural()``.
        indices: on the wire, "packed", about log2(n / k) + 1.5 bits each, or "int32".
        start: so many steps send everything.  With 1, h is the gradient from the first step on;
            with ``True`` h starts from zero, and a big model is spared the dense message.
        average: weight of the past in a moving average that takes the place of g, in [0, 1).
            Noise of minibatches passes through EF21 as it is: 0.9 is EF21-SGDM (Fatkhullin,
            Tyurin, Richtarik, NeurIPS 2023), where the average starts with the first gradient and
            here with zero.

    Reference: Richtarik, Sokolov, Fatkhullin, NeurIPS 2021, arXiv 2106.05203.  Differs from it in:
    where it has a server that keeps G, every rank keeps one.

    What was not sent follows in the next step, though the gradient is the same:

    >>> world, gradient = World(EF21(density=0.5), size=1), np.array([4.0, 1.0, 0.0, 2.0])
    >>> [world.exchange([gradient])[0].direction.tolist() for step in range(2)]
    [[4.0, 0.0, 0.0, 2.0], [4.0, 1.0, 0.0, 2.0]]
    """

    reference = "Richtarik et al., NeurIPS 2021"

    density: Density = 0.02
    values: str | Codec = "float32"
    start: Start = dataclasses.field(default=True, metadata=converted(as_start))
    average: float = 0.0
    indices: str = "packed"

    def __post_init__(self) -> None:
        average = self.average
        if not is_number(average) or not 0 <= average < 1:
            raise ConfigError(f"average must be in [0, 1); got {average!r}")
        super().__post_init__()

    @functools.cached_property
    def blocks(self) -> Chain:
        via = allgather(operators.top_k(self.density), self.values, indices=self.indices)
        average: tuple[Transform, ...] = (smoothing(self.average),) if self.average else ()
        return chain(*average, ef21(), via=dense_until(self.start, via))
