"""Codes of whole buckets: one message and one header for all tensors, and no fresh memory.

A chain of elementwise transforms, such as error feedback, and codes treats a bucket at once.  Its
blocks treat one tensor after the other, with the same bits; tests hold the two equal.
Shards are those that each tensor has by itself.  One plan serves whole tensors and shards
(:mod:`hvd_compress.fused.coded_plan`), and the memory that arrays are in decides who does its work.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import ClassVar

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, Spec
from hvd_compress.codecs import Codec
from hvd_compress.fused.coded_on_device import CodedOnDevice
from hvd_compress.fused.coded_on_host import CodedOnHost
from hvd_compress.fused.coded_plan import CodedPlan
from hvd_compress.fused.in_place import is_on_host
from hvd_compress.fused.stages import StagedForm
from hvd_compress.kernels import loops_of


@dataclasses.dataclass(frozen=True, eq=False)
class FusedCodes(StagedForm):
    """A form for whole buckets; see :class:`hvd_compress.fused.in_place.InPlaceForm`.

    Attributes:
        codec: of all values.
    """

    codec: Codec
    #: whether each tensor is one run of elements for its codec
    is_whole: ClassVar[bool]

    def weight(self, context: Context) -> int:
        return math.prod(context.shape)

    def takes(self, x: Array) -> bool:
        if super().takes(x):
            return True
        loops, n = loops_of(x), backend_of(x).size(x)
        if loops is None:
            return False
        taken: bool = loops.Codes.takes(self.codec, n, self.is_whole)
        return taken

    def plan(self, specs: Sequence[Spec], key: Hashable, step: Context) -> CodedPlan:
        plan = CodedOnHost if is_on_host(specs[0].x) else CodedOnDevice
        return plan(self, specs, key, step, self.codec, self.is_whole)


class FusedAlltoall(FusedCodes):
    """Every rank adds up one shard of each tensor, and codes what comes out."""

    is_whole = False


class FusedAllgather(FusedCodes):
    """Every rank gets the codes of all, and adds them up in the order of the ranks."""

    is_whole = True
