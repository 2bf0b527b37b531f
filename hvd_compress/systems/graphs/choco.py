"""CHOCO-SGD: compressed differences to a copy that all neighbours have."""

from __future__ import annotations

import dataclasses

from hvd_compress.base import Array
from hvd_compress.codecs import uniform_dithering
from hvd_compress.codecs.base import Codec
from hvd_compress.config import check_fraction, check_seed, converted
from hvd_compress.errors import ConfigError
from hvd_compress.meetings.codes import codes
from hvd_compress.systems.graphs.base import (
    DecentralizedMethod,
    Network,
    Update,
    Vectors,
    as_codec,
    mix,
)
from hvd_compress.systems.graphs.topologies import Cycle, Topology, as_topology


@dataclasses.dataclass(frozen=True)
class ChocoSGD(DecentralizedMethod, name="choco_sgd"):
    """With a copy xh of x that neighbours have, too, and a codec Q::

        x' = x - mu grad(x);  xh+ = xh + Q(x' - xh);  x+ = x' + gamma (W - I) xh+        xh_0 = 0

    State: ``copy`` xh, and ``mixed`` = W xh, which is kept up by what arrives.  Sent: Q(x' - xh) to
    each neighbour.

    It has the bias of diffusion, and more for a smaller ``gamma``; :class:`LEAD` has none.

    Args:
        topology: undirected; see :class:`Diffusion`.
        codec: Q, biased or not; by default 5 levels, 2.4 bits an element.
        gamma: how far to mix, in (0, 1]: less for coarser codecs.
        seed: of codecs that draw.

    Reference: Koloskova, Stich, Jaggi, ICML 2019.

    >>> from hvd_compress.systems.graphs import simulate
    >>> gradient = lambda rank, x, step: x - rank  # together, ranks 0 to 3 have their best at 1.5
    >>> simulate(ChocoSGD(), gradient, [[0.0]] * 4, steps=500, rate=0.1).ravel().round(3)
    array([1.31 , 1.357, 1.643, 1.69 ])
    """

    reference = "Koloskova, Stich, Jaggi, ICML 2019"
    symmetric = True

    topology: Topology = dataclasses.field(default=Cycle(), metadata=converted(as_topology))
    codec: Codec = dataclasses.field(
        default=uniform_dithering(2, 256, "max"), metadata=converted(as_codec)
    )
    gamma: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.codec, Codec):
            raise ConfigError(f"codec must be a codec, for instance linear(4); got {self.codec!r}")
        check_fraction("gamma", self.gamma)
        check_seed(self.seed)

    def start(self, x: Array) -> Vectors:
        return {"copy": x * 0, "mixed": x * 0}

    def update(self, x: Array, local: Array, state: Vectors, network: Network) -> Update:
        seen, total = yield from mix(local - state["copy"], network, codes(self.codec), self.seed)
        copy, mixed = state["copy"] + seen, state["mixed"] + total
        return local + self.gamma * (mixed - copy), {"copy": copy, "mixed": mixed}
