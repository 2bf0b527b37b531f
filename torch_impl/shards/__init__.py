"""Compressed collectives of FSDP2: the reduce-scatter of gradients, and the all-gather of
parameters."""

from .exchange import ShardExchange, compress_shards

__all__ = ["ShardExchange", "compress_shards"]
