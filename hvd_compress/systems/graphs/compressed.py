"""Methods over a graph that send few bits: CHOCO-SGD, LEAD and Prox-LEAD.

CHOCO-SGD sends differences to a copy that all neighbours have, in any codec.  LEAD and Prox-LEAD
are exact with two bits per element.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hvd_compress.base import Array
from hvd_compress.codecs import uniform_dithering
from hvd_compress.codecs.base import Codec
from hvd_compress.config import check_choice, check_fraction, check_seed, converted, is_number
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.meetings.codes import codes
from hvd_compress.systems.graphs.base import (
    DecentralizedMethod,
    Neighborhood,
    Proximal,
    Update,
    Vectors,
    as_codec,
    mix,
)


def blockwise(bits: int, block: int = 256) -> Codec:
    """Return the quantiser of LEAD, ``|x|_max 2^-(b-1) sign(x) floor(2^(b-1) |x| / |x|_max + u)``
    with u uniform in [0, 1), for blocks of ``block`` elements: unbiased, 2^b + 1 levels.

    Args:
        bits: b, in the authors' count; log2(2^b + 1) bits per element are sent, and a float32 per
            block.
        block: elements that share a maximum.
    """
    check_choice("bits", bits, tuple(range(1, 9)))
    return uniform_dithering(2 ** (bits - 1), block, "max")


def _as_codec(codec: Any) -> Codec:
    found = as_codec(codec)
    try:
        is_unbiased = found.classes(1024).zeta is not None
    except UnsupportedError:
        is_unbiased = False
    if not is_unbiased:
        raise ConfigError(
            f"codec={found!r} is biased, or not known to be unbiased, and LEAD diverges with such "
            "codecs: use for instance blockwise(2) or natural(); ChocoSGD takes biased ones"
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
        topology, prox: see :class:`Diffusion`; undirected.  With ``prox`` it is Prox-LEAD.
        codec: C, unbiased; ``None`` for no compression.
        alpha, gamma: how fast H follows, in (0, 1], with 1 bit at most 0.5; how far to mix, < 2.
        seed: of codecs that draw.

    Reference: Liu et al., ICLR 2021 (LEAD); Li, Liu, Tang, Yan, Yuan, 2021 (Prox-LEAD).

    >>> from hvd_compress.systems.graphs import simulate
    >>> gradient = lambda rank, x, step: x - rank  # together, ranks 0 to 3 have their best at 1.5
    >>> simulate(LEAD(), gradient, [[0.0]] * 4, steps=500, rate=0.1).ravel().round(3)
    array([1.5, 1.5, 1.5, 1.5])
    """

    symmetric = True

    codec: Codec = dataclasses.field(
        default=uniform_dithering(2, 256, "max"), metadata=converted(_as_codec)
    )
    alpha: float = 0.5
    gamma: float = 1.0
    prox: Proximal | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction("alpha", self.alpha)
        if not is_number(self.gamma) or not 0 < self.gamma < 2:
            raise ConfigError(
                f"gamma must be in (0, 2), for instance gamma=1.0; got {self.gamma!r}"
            )
        check_seed(self.seed)

    def start(self, x: Array) -> Vectors:
        return {"dual": x * 0, "h": x * 0, "mixed_h": x * 0}

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


@dataclasses.dataclass(frozen=True)
class ChocoSGD(DecentralizedMethod, name="choco_sgd"):
    """Train over a graph with compressed differences, with copies xh that neighbours have, too::

        method=hvd.ChocoSGD("cycle")

    A step, with a codec Q and xh_0 = 0::

        x' = x - mu grad(x);  xh+ = xh + Q(x' - xh);  x+ = x' + gamma (W - I) xh+

    State: ``copy`` xh, and ``mixed`` = W xh, updated from messages.  Sent: Q(x' - xh) to each
    neighbour.  It has the bias of diffusion, and more for a smaller ``gamma``; :class:`LEAD` has
    none.

    Args:
        topology: undirected; see :class:`Diffusion`.
        codec: Q, biased or not; by default 5 levels, 2.4 bits per element.
        gamma: how far to mix, in (0, 1]: less for coarser codecs.
        seed: of codecs that draw.

    Reference: Koloskova, Stich, Jaggi, ICML 2019.

    >>> from hvd_compress.systems.graphs import simulate
    >>> gradient = lambda rank, x, step: x - rank  # together, ranks 0 to 3 have their best at 1.5
    >>> simulate(ChocoSGD(), gradient, [[0.0]] * 4, steps=500, rate=0.1).ravel().round(3)
    array([1.31 , 1.357, 1.643, 1.69 ])
    """

    symmetric = True

    codec: Codec = dataclasses.field(
        default=uniform_dithering(2, 256, "max"), metadata=converted(as_codec)
    )
    gamma: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction("gamma", self.gamma)
        check_seed(self.seed)

    def start(self, x: Array) -> Vectors:
        return {"copy": x * 0, "mixed": x * 0}

    def update(self, x: Array, local: Array, state: Vectors, network: Neighborhood) -> Update:
        seen, total = yield from mix(local - state["copy"], network, codes(self.codec), self.seed)
        copy, mixed = state["copy"] + seen, state["mixed"] + total
        return local + self.gamma * (mixed - copy), {"copy": copy, "mixed": mixed}
