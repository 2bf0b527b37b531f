"""LEAD and Prox-LEAD: exact with two bits per element."""

from __future__ import annotations

import dataclasses
from typing import Any

from hvd_compress.base import Array
from hvd_compress.codecs import uniform_dithering
from hvd_compress.codecs.base import Codec
from hvd_compress.codecs.floats import plain
from hvd_compress.config import check_fraction, check_seed, converted, is_number
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.meetings.codes import codes
from hvd_compress.systems.decentralized import DecentralizedMethod, Update, Vectors, l1, mix
from hvd_compress.systems.topologies import Neighborhood

_TWO_BITS = uniform_dithering(2, 256, "max")


def _as_codec(codec: Any) -> Codec:
    found = plain() if codec is None else codec
    if not isinstance(found, Codec):
        raise ConfigError(f"codec must be a codec, for instance {_TWO_BITS}, or None: {codec!r}")
    try:
        is_unbiased = found.classes(1024).zeta is not None
    except UnsupportedError:
        is_unbiased = False
    if not is_unbiased:
        raise ConfigError(
            f"codec={found!r} is biased, or not known to be unbiased, and LEAD diverges with such "
            f"codecs: use for instance {_TWO_BITS} or natural()"
        )
    return found


@dataclasses.dataclass(frozen=True)
class LEAD(DecentralizedMethod, name="lead"):
    """Train over a graph, exactly, with messages of few bits::

        method=hvd.LEAD("cycle")

    One row for each node, G the gradients at X; only Q is sent::

        Z = X - eta G - eta D
        Q = C(Z - H);  Zh = H + Q;  Zw = Hw + W Q;  H += alpha Q;  Hw += alpha W Q
        D += gamma / (2 eta) (Zh - Zw);  X = prox_{eta r}(Z - gamma / 2 (Zh - Zw))

    State: ``dual`` = eta D, ``h`` = H, ``mixed_h`` = Hw.  float32 reaches errors of about 1e-4.

    Args:
        topology: undirected; see :class:`Diffusion`.
        codec: C, unbiased, by default the paper's quantiser of b = 2 bits; ``None``: none.
        alpha, gamma: how fast H follows, in (0, 1], with 1 bit at most 0.5; how far to mix, < 2.
        prox, seed: r, such as ``l1(0.05)``, for Prox-LEAD; the seed of codecs that draw.

    Reference: Liu et al., ICLR 2021 (LEAD); Li, Liu, Tang, Yan, Yuan, 2021 (Prox-LEAD).

    >>> from hvd_compress.systems.graphs import simulate
    >>> gradient = lambda rank, x, step: x - rank  # together, ranks 0 to 3 have their best at 1.5
    >>> simulate(LEAD(), gradient, [[0.0]] * 4, steps=500, rate=0.1).ravel().round(3)
    array([1.5, 1.5, 1.5, 1.5])
    """

    symmetric = True
    keys = ("dual", "h", "mixed_h")

    codec: Codec = dataclasses.field(default=_TWO_BITS, metadata=converted(_as_codec))
    alpha: float = 0.5
    gamma: float = 1.0
    prox: l1 | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction("alpha", self.alpha)
        if not is_number(self.gamma) or not 0 < self.gamma < 2:
            raise ConfigError(
                f"gamma must be in (0, 2), for instance gamma=1.0; got {self.gamma!r}"
            )
        check_seed(self.seed)

    def update(self, x: Array, local: Array, state: Vectors, network: Neighborhood) -> Update:
        h, mixed_h = state["h"], state["mixed_h"]
        z = local - state["dual"]
        seen, total = yield from mix(z - h, network, codes(self.codec), self.seed)
        apart = (self.gamma / 2) * ((h + seen) - (mixed_h + total))
        new = {
            "dual": state["dual"] + apart,
            "h": h + self.alpha * seen,
            "mixed_h": mixed_h + self.alpha * total,
        }
        return z - apart, new
