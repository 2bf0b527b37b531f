"""Hooks for modules of PyTorch, ``DistributedDataParallel`` and FSDP, and FSDP2's collectives of
shards."""

from .hook import DDPState, ddp_hook

__all__ = ["DDPState", "ddp_hook"]
