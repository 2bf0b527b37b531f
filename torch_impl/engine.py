"""Horovod under PyTorch: collectives are asynchronous, and have names."""

from __future__ import annotations

import atexit
import ctypes
import functools
import time
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import torch

from hvd_compress.agreement import Terms
from hvd_compress.config import time_out
from hvd_compress.engines.named import NamedEngine, Op, ProcessSetEngine
from hvd_compress.errors import CollectiveTimeout
from hvd_compress.integrations.environment import OURS, compare
from hvd_compress.requests import Collective, Sum
from hvd_compress.times import end_at_once

from .backend import from_numpy

#: what Horovod says of a collective whose connections have ended names no cause
_LOST = (
    "hvd_compress: a rank has ended or is stopped, or the network to it is down: look for its own "
    "message, and for what the launcher says of it; the others report after it. A longer time-out "
    "under Gloo: HOROVOD_GLOO_TIMEOUT_SECONDS (30 if not set)"
)
_UNSCALED = {"prescale_factor": 1.0, "postscale_factor": 1.0}
#: between two questions whether a collective is done; Horovod's own wait keeps a core busy
_PAUSE = 2e-5


def _held(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias whose gradient the tensor is, so that C++ refers to it, too.

    When Horovod's thread ends, as it does when another rank has ended, it drops all tensors in
    flight, and has its locks meanwhile.  PyTorch 2.13 takes Python's lock where Python alone is
    left with a tensor.  A thread that has this, and submits another tensor, waits for Horovod's
    locks: neither would move on.
    """
    alias = tensor.detach()
    alias.grad = tensor
    return alias


def gather_bytes(hvd: Any, own: bytes, name: str, process_set: Any) -> bytes:
    """Return the bytes of all ranks, end to end."""
    mine = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    handle = hvd.allgather_async(mine, name=name, process_set=process_set)
    wait_until_done(hvd, handle, name)
    return bytes(hvd.synchronize(handle).tolist())


def wait_until_done(hvd: Any, handle: Any, name: str) -> None:
    """Wait for a collective of Horovod, which itself would wait for ever.

    Raises:
        CollectiveTimeout: it is not done after ``HVD_COMPRESS_TIMEOUT`` seconds.  The process then
            ends without ``hvd.shutdown()``, which would wait for the same rank.
    """
    seconds, start = time_out(), time.monotonic()
    while not hvd.poll(handle):
        if time.monotonic() - start > seconds:
            atexit.register(end_at_once, 1.0)
            raise CollectiveTimeout(
                f"rank {hvd.rank()} of {hvd.size()}: {name!r} is not done after {seconds:g} s. A "
                "rank has failed, is stopped, or waits elsewhere, perhaps in a collective of your "
                "own or since it steps its optimizers in another order: look for its own message, "
                "and for ranks and names in Horovod's warnings about stalled tensors. A longer "
                "time-out: HVD_COMPRESS_TIMEOUT=seconds"
            )
        time.sleep(_PAUSE)


class TorchEngine(NamedEngine):
    """The base class of engines whose collectives work on torch tensors."""

    def _carry(self, request: Collective, name: str) -> Generator[Op, Any, Any]:
        """Arrays of NumPy travel as tensors in the same memory, and so do the replies."""
        if not isinstance(request.arrays[0], np.ndarray):
            return (yield from super()._carry(request, name))
        tensors = request.carrying([from_numpy(x, None) for x in request.arrays])
        if isinstance(request, Sum):  # it is made in the same memory
            tensors.owned = request.owned
        reply = yield from super()._carry(tensors, name)
        return [x.numpy() for x in reply] if isinstance(reply, list) else reply.numpy()

    def _splits(self, sizes: Sequence[int]) -> torch.Tensor:
        return torch.tensor(sizes, dtype=torch.int32)


class HorovodEngine(TorchEngine, ProcessSetEngine):
    """Collectives of ``horovod.torch``, which is ``hvd``; see :class:`ProcessSetEngine`."""

    def __init__(self, hvd: Any, process_set: Any, predivide: float = 1.0) -> None:
        super().__init__(process_set, predivide)
        self._hvd = hvd
        #: by handle, names and aliases of what is in flight, and was when the collectives failed
        self._in_use: dict[Any, tuple[str, list[torch.Tensor]]] = {}
        self._left: dict[Any, tuple[str, list[torch.Tensor]]] = {}

    @property
    def prefix(self) -> str:  # type: ignore[override]
        return self._numbered("hvd_compress")

    def agree(self, terms: Terms, like: torch.Tensor, at_once: bool = False) -> None:
        if not self._agreed_once:  # a rank with Horovod's own optimizer waits for this
            compare(self._hvd, self._set, functools.partial(gather_bytes, self._hvd), OURS)
        super().agree(terms, like, at_once)

    def _launch(self, op: Op) -> Any:
        self._check_is_running()
        call, tensors, options = self._call(op)
        held = list(map(_held, tensors))
        try:
            handle = call(*tensors, name=op.name, process_set=self._set, **options)
        except ValueError as error:
            if "same name" not in str(error):
                raise
            # Left behind by a set of workers of the same size: elastic training makes another.
            raise self._hvd.mpi_ops.HorovodInternalError(error) from None
        self._in_use[handle] = op.name, held
        return handle

    def _call(self, op: Op) -> tuple[Any, list[torch.Tensor], dict[str, Any]]:
        """Return a function of Horovod with its inputs and outputs, which its public ones would
        make where nobody could hold them, and its options."""
        hvd, x = self._hvd, op.tensor
        if op.splits is not None:
            tensors = [x, op.splits, x.new_empty(0), op.splits.new_empty(0)]
            return hvd.mpi_ops._alltoall_async, tensors, {}
        if op.kind not in ("sum", "max", "broadcast"):
            return hvd.mpi_ops._allgather_async, [x, x.new_empty(0)], {}
        tensors = [x, x if op.in_place else x.new_empty(x.shape)]
        if op.kind == "broadcast":
            return hvd.mpi_ops._broadcast_async, tensors, {"root_rank": self._global_rank(op.root)}
        options = {"op": hvd.Sum if op.kind == "sum" else hvd.Max}
        return hvd.mpi_ops._allreduce_async, tensors, options | _UNSCALED

    def _wait(self, handle: Any) -> Any:
        if not self._hvd.poll(handle):
            try:
                self._check_is_running()
            except self._hvd.mpi_ops.HorovodInternalError:
                # What came in just after Horovod's thread had emptied its queue is never done.
                if not self._hvd.poll(handle):
                    raise
            wait_until_done(self._hvd, handle, self._in_use[handle][0])
        try:
            result = self._hvd.synchronize(handle)
        except self._hvd.mpi_ops.HorovodInternalError as error:
            if not any(word in str(error).lower() for word in ("shut down", "gloo", "connection")):
                raise
            raise type(error)(f"{error}\n{_LOST}") from error
        self._in_use.pop(handle, None)
        return result

    def abandon(self) -> None:
        super().abandon()
        # Horovod's thread may not have dropped them yet.
        self._in_use, self._left = {}, self._in_use

    def _has_come(self, handle: Any) -> bool:
        return bool(self._hvd.poll(handle))

    def _check_is_running(self) -> None:
        """Raise ``HorovodInternalError`` if Horovod's thread has ended, as it does when a worker
        ends.  Then no process set has ranks, though the global one keeps its size.  A thread that
        is about to end is waited for."""
        library = self._hvd.mpi_ops._basics.MPI_LIB_CTYPES
        try:
            ranks = (ctypes.c_int * self._set.size())()
            has_ended = library.horovod_process_set_ranks(self._set.process_set_id, ranks) != 0
        except ValueError:
            has_ended = True
        if has_ended:
            raise self._hvd.mpi_ops.HorovodInternalError(
                "Horovod no longer runs: a rank has ended, perhaps because it had fewer batches "
                "(give all ranks equally many) or failed (hvd.elastic.run goes on without it); or "
                "hvd.shutdown() was called, after which hvd.init() starts it again"
            )

    def _sum_bfloat16(self, op: Op) -> Generator[Op, Any, torch.Tensor]:
        """Sum a bfloat16 array.  Horovod cannot add these, but it can carry their bits: every rank
        adds one part, in float32, and gives the rounded sum to all.  This sends as many bytes as a
        ring."""
        bits, size = op.tensor.view(torch.int16), self.size
        splits = self._splits([part.numel() for part in torch.tensor_split(bits, size)])
        mine, _ = yield Op("alltoall", f"{op.name}.scatter", bits, splits)
        # Nothing but this is left of what came in while the results are under way.
        mine = _added(mine.view(torch.bfloat16).view(size, -1))
        total = yield Op("gather", f"{op.name}.gather", mine.view(torch.int16))
        return total.view(torch.bfloat16)


def _added(rows: torch.Tensor) -> torch.Tensor:
    """Return the sum of rows of bfloat16, added in their order in float32, and rounded once."""
    total = rows[0].float()
    for row in rows[1:]:
        total += row
    return total.bfloat16()
