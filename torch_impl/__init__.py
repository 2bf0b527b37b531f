"""Drop-in for ``horovod.torch`` with gradient compression::

    import hvd_compress.torch as hvd

    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=..., compression=hvd.DGC)

Everything of ``horovod.torch`` is here.  Horovod's own import line works as well, if this package
is imported too: ``import horovod.torch as hvd; from hvd_compress.torch import DGC``.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

try:
    import torch  # noqa: F401
except ImportError as error:
    raise ImportError("hvd_compress.torch needs PyTorch: pip install torch") from error

import hvd_compress

# Not the building blocks: ``hvd.allreduce`` and ``hvd.allgather`` are Horovod's.
from hvd_compress import (
    BF16,
    DGC,
    FP16,
    Compressor,
    NoCompression,
    RandomK,
    TopK,
    as_compressor,
)
from hvd_compress.errors import (
    CompressionError,
    ConfigError,
    PayloadError,
    SetupError,
    UnboundError,
    UnsupportedError,
)
from hvd_compress.launch import find_mpi
from hvd_compress.schedules import ExponentialWarmup, StagedWarmup, warmup_to
from hvd_compress.torch.ddp import DDPState, ddp_hook

__all__ = [
    "BF16",
    "DGC",
    "FP16",
    "CompressionError",
    "Compressor",
    "ConfigError",
    "DDPState",
    "ExponentialWarmup",
    "NoCompression",
    "PayloadError",
    "RandomK",
    "SetupError",
    "StagedWarmup",
    "TopK",
    "UnboundError",
    "UnsupportedError",
    "as_compressor",
    "ddp_hook",
    "warmup_to",
]


def _show_log() -> None:
    """What moves where is worth a line on the screen, unless the user has set up logging."""
    logger = logging.getLogger("hvd_compress")
    if not logging.getLogger().handlers and not logger.handlers and logger.level == logging.NOTSET:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


def _load_horovod() -> Any:
    if "PMI_RANK" in os.environ and "OMPI_COMM_WORLD_RANK" not in os.environ:
        # Started by MPICH, and Horovod may be built with Open MPI: who loads its MPI first decides
        # which one mpi4py talks to, and with the wrong one every process is a world of its own.
        with contextlib.suppress(ImportError, RuntimeError):
            import mpi4py.MPI  # noqa: F401
    try:
        import horovod.torch as horovod_torch
    except ImportError as error:
        return error
    if not hasattr(horovod_torch, "DistributedOptimizer"):
        return ImportError("Horovod is installed, but it was built without PyTorch")
    from hvd_compress.torch.registration import register

    register(horovod_torch)
    return horovod_torch


find_mpi()
_show_log()
_horovod = _load_horovod()


def __getattr__(name: str) -> Any:
    """The rest of ``horovod.torch``."""
    if name.startswith("__"):
        raise AttributeError(name)
    if isinstance(_horovod, ImportError):
        raise SetupError(
            f"hvd.{name} needs Horovod with PyTorch ({_horovod}); run `hvd-compress "
            "install-horovod`, and `hvd-compress doctor` to see what is there"
        ) from _horovod
    if not hasattr(_horovod, name):
        where = "; building blocks are in hvd_compress" if hasattr(hvd_compress, name) else ""
        raise AttributeError(f"hvd_compress.torch and horovod.torch have no {name!r}{where}")
    return getattr(_horovod, name)


def __dir__() -> list[str]:
    public = [name for name in dir(_horovod) if not name.startswith("_")]
    return sorted({*globals(), *public})
