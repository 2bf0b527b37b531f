"""How the ranks' contributions are averaged, one way a file; the contract is
``chain.Aggregator``."""

from hvd_compress.aggregators.allgather import allgather
from hvd_compress.aggregators.allreduce import allreduce
from hvd_compress.aggregators.alltoall import alltoall
from hvd_compress.aggregators.dct_top_k import dct_top_k
from hvd_compress.aggregators.dense_until import dense_until
from hvd_compress.aggregators.gather_drawn import gather_drawn
from hvd_compress.aggregators.leader_top_k import leader_top_k
from hvd_compress.aggregators.learned import learned_allreduce, learned_server
from hvd_compress.aggregators.ok_topk import ok_topk
from hvd_compress.aggregators.power_sgd import power_sgd

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "dct_top_k",
    "dense_until",
    "gather_drawn",
    "leader_top_k",
    "learned_allreduce",
    "learned_server",
    "ok_topk",
    "power_sgd",
]
