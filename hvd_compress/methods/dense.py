"""Methods that send every element: as it is, or in half precision."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

from hvd_compress.chain import Chain, chain
from hvd_compress.config import converted
from hvd_compress.meetings import allreduce
from hvd_compress.methods.chained import Chained
from hvd_compress.methods.rows import checked_rows


@dataclasses.dataclass(frozen=True)
class _Dense(Chained):
    """The base of these methods."""

    #: in which elements are sent
    wire: ClassVar[str]

    algorithm: str | None = None
    rows: str = dataclasses.field(default="whole", metadata=converted(checked_rows))

    @functools.cached_property
    def blocks(self) -> Chain:
        return chain(via=allreduce(self.wire, algorithm=self.algorithm))


@dataclasses.dataclass(frozen=True)
class NoCompression(_Dense, name="none"):
    """Send gradients uncompressed: 32 bits per element, 16 for half-precision gradients.  No
    state::

        compression=hvd.NoCompression()

    Options:
        algorithm, rows: as in all methods.

    >>> world = World(NoCompression(), size=2)
    >>> world.exchange([np.array([4.0, 1.0]), np.array([1.0, 2.0])])[0].mean
    array([2.5, 1.5])
    """

    wire = "gradient"


@dataclasses.dataclass(frozen=True)
class FP16(_Dense, name="fp16"):
    """Send gradients in IEEE half precision: 16 bits per element, in sparse gradients too.  No
    state::

        compression=hvd.FP16()

    Values beyond 65504 become Inf on every rank, values below 6e-8 zero: use loss scaling.

    Options:
        algorithm, rows: as in all methods.

    Reference: IEEE 754.

    Values that are too large and too small:

    >>> gradient = np.array([1.001, 1e5, 1e-8], np.float32)
    >>> World(FP16(), size=2).exchange([gradient, gradient])[0].mean
    array([1.0009766,       inf, 0.       ], dtype=float32)
    """

    reference = "IEEE 754"
    wire = "float16"

    rows: str = dataclasses.field(default="float16", metadata=converted(checked_rows))


@dataclasses.dataclass(frozen=True)
class BF16(_Dense, name="bf16"):
    """Send gradients in bfloat16: 16 bits per element, in sparse gradients too.  No state::

        compression=hvd.BF16()

    It has the range of float32, and 8 bits of significand.

    Options:
        algorithm, rows: as in all methods.

    Reference: Kalamkar et al., arXiv 1905.12322.

    >>> gradient = np.array([1.001, 1e38, 1e-30], np.float32)
    >>> World(BF16(), size=2).exchange([gradient, gradient])[0].mean
    array([1.000000e+00, 9.969210e+37, 9.984021e-31], dtype=float32)
    """

    reference = "Kalamkar et al., 2019"
    wire = "bfloat16"

    rows: str = dataclasses.field(default="bfloat16", metadata=converted(checked_rows))
