"""INCEPTIONN (Li, Park, Alian, Yuan, Qu, Pan, Wang, Schwing, Esmaeilzadeh, Kim; MICRO 2018)."""

from __future__ import annotations

import dataclasses
import functools

from hvd_compress import codecs
from hvd_compress.aggregators import allgather
from hvd_compress.chain import Chain, chain
from hvd_compress.config import check_choice
from hvd_compress.methods.chained import Chained
from hvd_compress.transforms import error_feedback


@dataclasses.dataclass(frozen=True)
class INCEPTIONN(Chained, name="inceptionn"):
    """Send nothing of a value below ``bound``, else 8, 16 or all bits of it, by its magnitude.

    State: ``residual``.  Sent: 2 bits an element, and the bits of those that are large enough; see
    :class:`hvd_compress.blocks.inceptionn`.  No value changes by ``bound`` or more.

    Options:
        bound: a power of two from 2^-14 to 1/2, in units of the gradient.
        error_feedback: add what was not sent to the next gradient.  Without it, as in the paper, an
            element whose gradient stays below ``bound`` never moves.

    Reference: Li et al., MICRO 2018.  Differs from it in: error feedback; every rank receives every
    other's codes, where the paper's network cards code and add up on a ring; and see the codec.

    All bits, 16, 8 and none:

    >>> world = World(INCEPTIONN(bound=2.0**-4), size=1)
    >>> world.exchange([np.array([1.5, 0.7, 0.1, 0.05])])[0].mean.round(4)
    array([1.5   , 0.7   , 0.0996, 0.    ])
    """

    reference = "Li et al., MICRO 2018"

    bound: float = 2.0**-10
    error_feedback: bool = True

    def __post_init__(self) -> None:
        check_choice("error_feedback", self.error_feedback, (True, False))
        super().__post_init__()

    @functools.cached_property
    def blocks(self) -> Chain:
        via = allgather(codecs.inceptionn(self.bound))
        return chain(error_feedback(), via=via) if self.error_feedback else chain(via=via)
