"""Eight bits a number, with an exponent (Micikevicius et al., 2022)."""

from __future__ import annotations

import dataclasses
import functools

from hvd_compress import codecs
from hvd_compress.chain import Chain, chain
from hvd_compress.meetings import alltoall
from hvd_compress.methods.chained import Chained
from hvd_compress.transforms import error_feedback


@dataclasses.dataclass(frozen=True)
class FP8(Chained, name="fp8"):
    """Eight-bit floats and a scale a bucket, which puts the largest element at their largest.

    Sent: 8 bits an element, and the sums of a shard to all; received: twice 8 bits.  Each rank
    adds up one shard in full precision, so sums are rounded once and not at every hop.
    State: ``residual`` and ``owner_residual``, which keep what rounding leaves out.

    Options:
        format: "e4m3" has three bits of significand, "e5m2" two and a larger range.
        bucket: elements that share a scale; ``None``: a tensor, or a rank's shard of it.

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
