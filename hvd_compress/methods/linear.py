"""Integers of eight bits or fewer, and a scale a column."""

from __future__ import annotations

import dataclasses
import functools

from hvd_compress import codecs
from hvd_compress.chain import Chain, chain
from hvd_compress.meetings import alltoall
from hvd_compress.methods.chained import Chained
from hvd_compress.transforms import error_feedback


@dataclasses.dataclass(frozen=True)
class LinearQuantization(Chained, name="linear"):
    """Round to the nearest of 2^bits - 1 even levels, between minus and plus the largest magnitude
    of a column: int8 quantisation.

    Sent: ``bits`` bits an element, and the sums of a shard to all; received: twice as much.  Each
    rank adds up one shard in full precision, so sums are rounded once and not at every hop.
    State: ``residual`` and ``owner_residual``, which keep what rounding leaves out.

    The largest elements make up most of a gradient's norm, and there an integer of 8 bits is finer
    than a float of 8 bits: see :class:`FP8`, which is for columns of a very wide range.

    Options:
        bits: 2 to 8.
        column: elements that share a scale; ``None``: a tensor, or a rank's shard of it.

    Reference: Dettmers, ICLR 2016.

    >>> world = World(LinearQuantization(bits=4), size=1)
    >>> world.exchange([np.array([7.0, 2.2, -0.6, 0.1])])[0].mean
    array([ 7.,  2., -1.,  0.])
    >>> world.states["tensor"][0]["residual"].round(1)
    array([0. , 0.2, 0.4, 0.1])
    """

    reference = "Dettmers, ICLR 2016"

    bits: int = 8
    column: int | None = 512

    @functools.cached_property
    def blocks(self) -> Chain:
        return chain(error_feedback(), via=alltoall(codecs.linear(self.bits, self.column)))
