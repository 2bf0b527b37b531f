"""Names of Horovod that every drop-in over MPI alone has, and the errors for those it has not."""

from __future__ import annotations

from typing import Any

from hvd_compress.config import is_number, is_one_of
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.methods import FP16, NoCompression
from hvd_compress.mpi import process_sets
from hvd_compress.mpi.process_sets import *  # noqa: F403

Average, Sum, Max, Adasum = "mean", "sum", "max", "adasum"

__all__ = ["Adasum", "Average", "Compression", "Max", "Sum", *process_sets.__all__]

#: by drop-in, names that are there with Horovod alone, and beginnings of such names
_ONLY_WITH_HOROVOD = {
    "hvd_compress.torch": (
        *("SyncBatchNorm", "poll", "allreduce_async_", "allgather_async", "broadcast_async"),
        *("broadcast_async_", "grouped_*", "sparse_*"),
    ),
    "hvd_compress.tensorflow": (
        *("SyncBatchNormalization", "BroadcastGlobalVariablesHook", "broadcast_", "rank_op"),
        *("broadcast_global_variables", "size_op", "grouped_allgather", "grouped_reducescatter*"),
    ),
    "": (
        *("join", "elastic", "Min", "Product", "cross_rank", "cross_size", "start_timeline"),
        *("stop_timeline", "is_homogeneous", "alltoall*", "reducescatter*"),
    ),
}


class Compression:
    """Horovod's names for the methods without state.

    They are instances, so that a script that says ``none`` can be told from one that names
    ``NoCompression``.

    >>> hvd.Compression.fp16
    FP16(algorithm=None, rows='float16')
    """

    none = NoCompression()
    fp16 = FP16()


def missing(name: str, module: str) -> Exception:
    """Return the error for a name that ``module``, such as ``hvd_compress.torch.mpi``, has not."""
    drop_in = module.removesuffix(".mpi")
    for package, names in _ONLY_WITH_HOROVOD.items():
        if drop_in.startswith(package) and any(
            name.startswith(only[:-1]) if only.endswith("*") else name == only for only in names
        ):
            return UnsupportedError(f"hvd.{name} needs Horovod: import {drop_in} as hvd")
    return AttributeError(f"{module} has no {name!r}")


def operation(op: Any, average: Any, *factors: Any) -> str:
    """Return the operation that these options of Horovod's functions mean.

    Args:
        op: ``None`` for what ``average`` says.
        average: older than ``op``: ``False`` means ``op=hvd.Sum``.
        factors: by which is multiplied before and after.
    """
    if not isinstance(average, bool | None):
        raise ConfigError(f"average={average!r}: True, False, or write op=; names go to name=")
    if op is None:
        op = Sum if average is False else Average
    if not is_one_of(op, (Average, Sum, Max)):
        raise UnsupportedError(f"op={op!r}: over MPI there are hvd.Average, hvd.Sum and hvd.Max")
    for factor in factors:
        if not is_number(factor):
            raise ConfigError(f"prescale_factor, postscale_factor: numbers; got {factor!r}")
    return str(op)
