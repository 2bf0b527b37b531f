"""Hot loops: compiled if the package was built with a C++ compiler, else in NumPy.

Both give the same bits; :mod:`hvd_compress.kernels.reference` says what is computed.  The compiled
ones take arrays of any library by their address in host memory, and release the interpreter's lock.
They use as many threads as PyTorch does if that is imported.  Otherwise they use
``OMP_NUM_THREADS``, by default one for each core that this process may run on.  :func:`loops_of`
finds those for a GPU's memory.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.kernels import reference
from hvd_compress.kernels.arrays import (
    Array,
    Column,
    Momentum,
    Selected,
    Steps,
    addresses,
    momenta_of,
)

__all__ = [
    "Column",
    "Selected",
    "Steps",
    "TopKSelection",
    "add_up",
    "addresses",
    "crc32",
    "is_compiled",
    "loops",
    "loops_of",
    "momenta_of",
    "stream",
    "threads",
]

#: what helps where there are no compiled loops
INSTALL = (
    "install a C++ compiler, then pip install --force-reinstall --no-deps hvd_compress, or in a "
    "checkout make setup"
)
#: of what is called in the compiled module, and how; common.h has the same number
INTERFACE = 7
logger = logging.getLogger("hvd_compress")


#: what starters call the number of ranks on this machine: horovodrun, Open MPI, MPICH, Slurm
_RANKS_HERE = (
    *("HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    "SLURM_NTASKS_PER_NODE",
)


def _load() -> tuple[Any, str]:
    """Return the compiled module, or ``None`` and why there is none."""
    try:
        module = importlib.import_module("hvd_compress.kernels.native")
    except ImportError as error:
        return None, str(error)
    if (found := getattr(module, "INTERFACE", None)) != INTERFACE:
        problem = f"{module.__file__} is of another version (interface {found}, not {INTERFACE})"
        return None, problem
    return module, ""


native, problem = _load()


def loops() -> Any:
    """Return the compiled module, or the reference, which has the same functions of NumPy's arrays:
    those for codes of indices, and ``merge``."""
    return native or reference


@functools.cache
def is_compiled() -> bool:
    """Return whether the loops are compiled.  The first call logs a warning if they are not."""
    if native is None:
        logger.warning(
            "hvd_compress has no compiled loops (%s), and NumPy serves, several times as slow: %s",
            problem,
            INSTALL,
        )
    return native is not None


def threads() -> int:
    if (torch := sys.modules.get("torch")) and hasattr(torch, "get_num_threads"):
        return torch.get_num_threads()
    return _number("OMP_NUM_THREADS") or _cores_of_a_rank()


@functools.cache
def _cores_of_a_rank() -> int:
    """Return how many cores this process may use.  Ranks that are bound to none share them, since
    all would take all."""
    cores = os.cpu_count() or 1
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    ranks = next(filter(None, map(_number, _RANKS_HERE)), 1)
    return max(1, min(own, cores // ranks))


def _number(variable: str) -> int:
    """Return the first number of a variable of the environment, 0 if there is none."""
    text = os.environ.get(variable, "").split(",")[0]
    return int(text) if text.isdecimal() else 0


class TopKSelection:
    """See :class:`hvd_compress.kernels.reference.Selection`; its arrays may be of any library, in
    host memory.  A selection remembers the last step's thresholds, which makes it faster and
    changes no result."""

    def __init__(self, sizes: Sequence[int], counts: Sequence[int]) -> None:
        own = native if is_compiled() else reference
        self._selection = own.Selection(list(sizes), list(counts))

    def select(self, steps: Steps, momentum: Momentum = None, nesterov: bool = False) -> Selected:
        if not is_compiled():
            return self._selection.select(steps.on_host(), momentum, nesterov)
        kind = 0 if momentum is None else 2 if nesterov else 1
        kind = 3 if steps.residuals is None else kind
        momenta = momenta_of(momentum, len(steps.gradients.arrays))
        tables = steps.tables()
        return Selected(*self._selection.select(*tables, kind, momenta, threads()))

    def settle(
        self,
        steps: Steps,
        indices: np.ndarray,
        remaining: np.ndarray,
        masking: bool,
        finite: np.ndarray,
    ) -> None:
        if not is_compiled():
            self._selection.settle(steps.on_host(), indices, remaining, masking, finite)
            return
        tables = steps.tables()
        self._selection.settle(*tables, indices, remaining, masking, finite, threads())


def loops_of(x: Array) -> Any:
    """Return the module with the loops for arrays in memory where ``x`` is: this one, or that of a
    device.  ``None``: there is none."""
    name = backend_of(x).loops(x)
    return None if name is None else _module(name)


_module = functools.cache(importlib.import_module)


def add_up(
    out: Column,
    indices: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
    size: int,
) -> None:
    """See :func:`hvd_compress.kernels.reference.add_up`; ``out`` may have arrays of any library."""
    if is_compiled():
        native.add_up(out.addresses, out.sizes, indices, values, size, threads())
    else:
        reference.add_up(out.on_host(), indices, values, size)


def stream(arrays: Sequence[tuple[Array, Array, Array]]) -> None:
    """Read three arrays (1-D, float32) of each tensor and write two of them.  A step with momentum
    and a residual cannot do with less: the floor for benchmarks."""
    columns = [Column(list(column)) for column in zip(*arrays, strict=True)]
    sizes = columns[0].sizes
    table = np.stack([Column(column.arrays, sizes).addresses for column in columns], 1)
    native.stream(np.ascontiguousarray(table), sizes, threads())


def crc32(x: np.ndarray, start: int = 0) -> int:
    """Return the CRC-32 of the bytes of ``x`` (1-D, uint8, contiguous) after bytes whose CRC-32 is
    ``start``, as ``zlib.crc32`` does."""
    if native is not None and native.has_fast_crc32:
        return native.crc32(x, start)
    return zlib.crc32(x.data, start)
