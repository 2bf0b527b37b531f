"""Hooks for modules of PyTorch: ``DistributedDataParallel`` and FSDP."""

from .hook import DDPState, ddp_hook

__all__ = ["DDPState", "ddp_hook"]
