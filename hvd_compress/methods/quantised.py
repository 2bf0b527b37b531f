"""Methods that round every element, to chance neighbours or to the nearest."""

from __future__ import annotations

import dataclasses
import functools

from hvd_compress import codecs
from hvd_compress.chain import Chain, chain
from hvd_compress.meetings import allgather, alltoall
from hvd_compress.methods.chained import Chained
from hvd_compress.transforms import error_feedback


@dataclasses.dataclass(frozen=True)
class QSGD(Chained, name="qsgd"):
    """Round each element to one of ``2 levels + 1`` evenly spaced levels, at random and unbiased::

        compression=hvd.QSGD(levels=7)

    Sent: log2(2 levels + 1) bits per element and a norm per bucket.  No state.

    Options:
        levels: of each sign, 1 or more.
        bucket: number of elements that share a norm; ``None`` for all of a tensor.
        norm: "max", the largest magnitude, which has less variance, or "l2".

    Reference: Alistarh, Grubic, Li, Tomioka, Vojnovic, NeurIPS 2017.

    >>> world = World(QSGD(levels=4), size=1)
    >>> [world.exchange([np.array([4.0, -1.0, 2.5])])[0].mean.tolist() for step in range(2)]
    [[4.0, -1.0, 2.0], [4.0, -1.0, 3.0]]
    """

    reference = "Alistarh et al., NeurIPS 2017"

    levels: int = 7
    bucket: int | None = 512
    norm: str = "max"

    @functools.cached_property
    def blocks(self) -> Chain:
        return chain(via=allgather(codecs.uniform_dithering(self.levels, self.bucket, self.norm)))


@dataclasses.dataclass(frozen=True)
class TernGrad(Chained, name="terngrad"):
    """Send -m, 0 or m for every element, at random; m is the largest magnitude of the tensor::

        compression=hvd.TernGrad(clip=2.5)

    Sent: 1.6 bits per element and m.  No state.

    Options:
        clip: in standard deviations of the tensor, as the paper's 2.5, or ``None``.  Clipping keeps
            m small, at the price of a bias.

    Reference: Wen, Xu, Yan, Wu, Wang, Chen, Li, NeurIPS 2017.

    >>> world = World(TernGrad(clip=None), size=1)
    >>> [world.exchange([np.array([4.0, -2.0, 0.0])])[0].mean.tolist() for step in range(2)]
    [[4.0, 0.0, 0.0], [4.0, -4.0, 0.0]]
    """

    reference = "Wen et al., NeurIPS 2017"

    clip: float | None = 2.5

    @functools.cached_property
    def blocks(self) -> Chain:
        return chain(via=allgather(codecs.ternary(self.clip)))


@dataclasses.dataclass(frozen=True)
class NaturalCompression(Chained, name="natural"):
    """Round magnitudes to powers of two, at random and unbiased::

        compression=hvd.NaturalCompression()

    Sent: 9 bits per element.  The variance is at most 1/8 |x|^2.  No state.

    Reference: Horvath, Ho, Horvath, Sahu, Canini, Richtarik, MSML 2022.

    Powers of two stay as they are; 3 becomes 2 or 4, with the expectation 3:

    >>> world = World(NaturalCompression(), size=1)
    >>> [world.exchange([np.array([4.0, -0.5, 3.0])])[0].mean.tolist() for step in range(2)]
    [[4.0, -0.5, 2.0], [4.0, -0.5, 4.0]]
    """

    reference = "Horvath et al., MSML 2022"

    @functools.cached_property
    def blocks(self) -> Chain:
        return chain(via=allgather(codecs.natural()))


@dataclasses.dataclass(frozen=True)
class NaturalDithering(Chained, name="natural_dithering"):
    """Round to ``levels`` powers of two below the norm of a bucket, at random and unbiased::

        compression=hvd.NaturalDithering(levels=7)

    Sent as by :class:`QSGD`, with the same options.  No state.

    Options:
        levels, bucket, norm: "l2", or "max".

    Reference: Horvath et al., MSML 2022; Beznosikov et al., JMLR 2023.

    >>> world = World(NaturalDithering(levels=3, norm="max"), size=1)
    >>> [world.exchange([np.array([4.0, -2.0, 3.0])])[0].mean.tolist() for step in range(2)]
    [[4.0, -2.0, 2.0], [4.0, -2.0, 4.0]]
    """

    reference = "Horvath et al., MSML 2022"

    levels: int = 7
    bucket: int | None = 512
    norm: str = "l2"

    @functools.cached_property
    def blocks(self) -> Chain:
        return chain(via=allgather(codecs.natural_dithering(self.levels, self.bucket, self.norm)))


@dataclasses.dataclass(frozen=True)
class FP8(Chained, name="fp8"):
    """Send 8-bit floats and a scale per bucket, and keep the rounding errors for later::

        compression=hvd.FP8()

    The scale maps the largest magnitude of a bucket to the largest 8-bit float.  Sent, received and
    kept as by :class:`LinearQuantization`.

    Options:
        format: "e4m3" has three bits of significand, "e5m2" two and a larger range.
        bucket: number of elements that share a scale; ``None``: all of a tensor, or of a rank's
            shard.

    Reference: Micikevicius et al., arXiv 2209.05433.

    >>> gradient = np.array([448.0, 100.0, 1.0, 0.3], np.float32)
    >>> World(FP8(), size=1).exchange([gradient])[0].mean.tolist()
    [448.0, 96.0, 1.0, 0.3125]
    """

    reference = "Micikevicius et al., 2022"

    format: str = "e4m3"
    bucket: int | None = 512

    @functools.cached_property
    def blocks(self) -> Chain:
        return chain(error_feedback(), via=alltoall(codecs.float8(self.format, self.bucket)))


@dataclasses.dataclass(frozen=True)
class LinearQuantization(Chained, name="linear"):
    """Round to evenly spaced levels, int8 by default, and keep the rounding errors for later::

        compression=hvd.LinearQuantization(bits=8)

    There are 2^bits - 1 levels, between minus and plus the largest magnitude of a column.  Each
    rank adds up one shard in full precision, so sums are rounded once and not at every hop.

    Sent: ``bits`` bits per element, and the sums of a shard to all; received: twice as much.
    State: ``residual`` and ``owner_residual``.

    Options:
        bits: 2 to 8.
        column: number of elements that share a scale; ``None``: all of a tensor, or of a rank's
            shard.

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
