"""Chains of blocks for whole buckets at once, with the same bits.

The chain of blocks defines what is computed, tensor by tensor.  If its form is one of those here
and loops take its arrays, a tensor has a place in the plan of its bucket
(:meth:`hvd_compress.base.Compressor.place`).  There all have one pass over memory, one message and
one addition.
"""

from hvd_compress.fused.coded import FusedCodes
from hvd_compress.fused.dense import FusedSum
from hvd_compress.fused.elements import FusedDrawn, FusedElements
from hvd_compress.fused.low_rank import FusedLowRank
from hvd_compress.fused.top_k import FusedTopK, dense_is_less

__all__ = [
    "FusedCodes",
    "FusedDrawn",
    "FusedElements",
    "FusedLowRank",
    "FusedSum",
    "FusedTopK",
    "dense_is_less",
]
