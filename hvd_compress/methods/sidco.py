"""SIDCo (Abdelmoniem, Elzanaty, Alouini, Canini; MLSys 2021)."""

from __future__ import annotations

import dataclasses
import functools

from hvd_compress import operators
from hvd_compress.aggregators import allgather
from hvd_compress.chain import Chain, chain
from hvd_compress.methods.chained import Chained
from hvd_compress.schedules import Density
from hvd_compress.transforms import error_feedback


@dataclasses.dataclass(frozen=True)
class SIDCo(Chained, name="sidco"):
    """Send about k = ceil(density * n) of the largest elements, found by the quantile of a fitted
    distribution; keep the rest for later.

    State: ``residual``; and ``stages``, two numbers, by which the number sent is kept near k: see
    ``operators/sidco.py``.  Sent: a value and a packed index an element.

    Options:
        density: fraction of elements to send, or a schedule.
        fit: "exponential", "pareto" or "gamma".
        stages: so many fits a step; ``None`` adapts.
        values: "float32" or "float16" on the wire.
        indices: on the wire, "packed", about log2(n / k) + 1.5 bits each, or "int32".

    Reference: Abdelmoniem, Elzanaty, Alouini, Canini, MLSys 2021.

    How many elements were sent, as multiples of k = 1000:

    >>> gradient = np.random.default_rng(0).laplace(size=100_000).astype(np.float32)
    >>> world = World(SIDCo(density=0.01), size=1)
    >>> counts = [np.count_nonzero(world.exchange([gradient])[0].mean) for step in range(3)]
    >>> [round(int(count) / 1000, 1) for count in counts]
    [1.0, 1.3, 1.2]
    """

    reference = "Abdelmoniem et al., MLSys 2021"

    density: Density = 0.001
    fit: str = "exponential"
    stages: int | None = None
    values: str = "float32"
    indices: str = "packed"

    @functools.cached_property
    def blocks(self) -> Chain:
        via = allgather(
            operators.sidco(self.density, self.fit, self.stages), self.values, indices=self.indices
        )
        return chain(error_feedback(), via=via)
