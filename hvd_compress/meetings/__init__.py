"""Meetings of the ranks: aggregators, one way of averaging a file, and the codings of what they
send, which servers and graphs call, too.

The contracts are ``chain.Aggregator`` and ``base.Coding``.  An aggregator whose messages nobody
else makes is its own coding.
"""

from hvd_compress.meetings.allgather import allgather
from hvd_compress.meetings.allreduce import allreduce
from hvd_compress.meetings.alltoall import alltoall
from hvd_compress.meetings.averaging import whole
from hvd_compress.meetings.codes import codes
from hvd_compress.meetings.dense_until import dense_until
from hvd_compress.meetings.drawn import drawn, gather_drawn
from hvd_compress.meetings.elements import elements
from hvd_compress.meetings.leader_top_k import leader_top_k
from hvd_compress.meetings.ok_topk import ok_topk
from hvd_compress.meetings.power_sgd import power_sgd

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "codes",
    "dense_until",
    "drawn",
    "elements",
    "gather_drawn",
    "leader_top_k",
    "ok_topk",
    "power_sgd",
    "whole",
]
