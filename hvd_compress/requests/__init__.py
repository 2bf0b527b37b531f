"""Requests of exchanges, each with all that engines ask about it; :mod:`.base` says what that is.

=============  ============================================  ======================================
request        reply                                         used by
=============  ============================================  ======================================
``Sum``        sum of the arrays over the ranks              linear methods (casts, random-k)
``Max``        element-wise maximum                          comparing ranks before each step
``Gather``     list of every rank's bytes, in rank order     sparse and quantised methods
``Alltoall``   list of the bytes each rank has for this one  quantised sums in shards
``Neighbors``  list of the neighbours' bytes                 decentralised methods
``Broadcast``  the array of one rank                         values that one rank decides about
``SparseSum``  sum of sparse vectors, and what was left out  top-k by an algorithm of choice
``Batch``      a function of arrays, without communication   many small matrices at once
``Joint``      this tensor's part of one exchange for many   one network for all tensors
=============  ============================================  ======================================
"""

from hvd_compress.requests.base import Collective, Request
from hvd_compress.requests.dense import Broadcast, Dense, Max, Sum
from hvd_compress.requests.local import Batch, Joint
from hvd_compress.requests.payloads import Alltoall, Gather, Neighbors
from hvd_compress.requests.sparse import Sparse, SparseSum, SparseTotal

__all__ = [
    "Alltoall",
    "Batch",
    "Broadcast",
    "Collective",
    "Dense",
    "Gather",
    "Joint",
    "Max",
    "Neighbors",
    "Request",
    "Sparse",
    "SparseSum",
    "SparseTotal",
    "Sum",
]
