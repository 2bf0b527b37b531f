"""Requests of one array, of which all ranks have one of the same shape and dtype."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import numpy as np

from hvd_compress.backends import Array, Output, backend_of
from hvd_compress.errors import CompressionError
from hvd_compress.requests.base import Collective, cut_at, require_alike


@dataclasses.dataclass(eq=False)
class Dense(Collective):
    """A request whose reply has the shape and dtype of ``array``, which are the same on all ranks;
    several are put end to end.

    >>> request = Sum(np.ones((2, 3), np.float32), wire="float16")
    >>> isinstance(request, Dense), request.describe(), request.nbytes
    (True, 'sum of 6 float16', 12)
    """

    array: Array

    sends = "array"
    #: the ranks' elements are added or compared: only bits whose dtype is known can travel
    reckons: ClassVar[bool] = True

    @property
    def kind(self) -> Hashable:
        device = getattr(self.array, "device", None)
        return super().kind, backend_of(self.array).dtype(self.array), str(device)

    @property
    def wire_dtype(self) -> str:
        """On the way between ranks."""
        if isinstance(self.array, np.ndarray):
            return self.array.dtype.name
        return backend_of(self.array).dtype(self.array)

    def describe(self) -> str:
        size = backend_of(self.array).size(self.array)
        return f"{type(self).__name__.lower()} of {size} {self.wire_dtype}"

    @property
    def nbytes(self) -> Any:
        dtype, array = self.wire_dtype, self.array
        if isinstance(array, np.ndarray):
            return array.size * itemsize(dtype)
        return backend_of(array).size(array) * itemsize(dtype)

    def count(self, reply: Any, rank: int, size: int) -> tuple[Any, Any]:
        return 0, self.nbytes if size > 1 else 0

    @classmethod
    def join(cls, requests: Sequence[Any]) -> Any:
        xp = backend_of(requests[0].array)
        flat = [xp.reshape(each.array, (xp.size(each.array),)) for each in requests]
        return requests[0].carrying([xp.concat(flat)])

    @classmethod
    def cut(cls, requests: Sequence[Any], reply: Any, rank: int) -> list[Any]:
        xp = backend_of(requests[0].array)
        parts = cut_at(reply, [xp.size(each.array) for each in requests])
        pairs = zip(requests, parts, strict=True)
        return [xp.reshape(part, xp.shape(each.array)) for each, part in pairs]

    @classmethod
    def reply(cls, requests: Sequence[Any], rank: int) -> Any:
        xp = backend_of(requests[0].array)
        looks = [(xp.shape(x.array), xp.dtype(x.array), x.wire_dtype) for x in requests]
        require_alike("the ranks' arrays differ in (shape, dtype, dtype on the wire)", looks)
        return cls._combined(requests)

    @classmethod
    @abc.abstractmethod
    def _combined(cls, requests: Sequence[Any]) -> Any:
        """Return the reply to these requests, one of each rank, whose arrays look alike."""

    def widened(self, array: Array) -> Any:
        """Return the request for the float32 that a bfloat16 array holds."""
        return self.carrying([array])

    def outputs(self, rank: int, size: int) -> Output | list[Output]:
        xp = backend_of(self.array)
        return xp.dtype(self.array), tuple(xp.shape(self.array))


@dataclasses.dataclass(eq=False)
class Sum(Dense):
    """Sum ``array`` over the ranks.  ``wire`` names the dtype on the wire if that is not the
    array's dtype: "float16" or "bfloat16".  The reply has the dtype of ``array``.  ``algorithm`` is
    for engines that have several; ``None`` means the engine's default.  ``owned``: nobody needs the
    array afterwards, and the sum may be made in it.  ``narrow``: the engine may let go of the array
    as well, and the reply may have the dtype on the wire.

    >>> Sum.reply([Sum(np.array([1.0, 2.0])), Sum(np.array([3.0, 4.0]))], rank=0)
    array([4., 6.])
    """

    wire: str | None = None
    algorithm: str | None = None
    owned: bool = False
    narrow: bool = False

    shared = ("wire", "algorithm")

    @property
    def wire_dtype(self) -> str:
        return self.wire or super().wire_dtype

    @classmethod
    def join(cls, requests: Sequence[Any]) -> Any:
        return dataclasses.replace(super().join(requests), owned=True)

    @classmethod
    def _combined(cls, requests: Sequence[Any]) -> Any:
        first = requests[0]
        arrays = [request.array for request in requests]
        if first.wire is None:
            return _added_up(arrays)
        # Like a good allreduce: the wire type between ranks, float32 for adding.
        xp = backend_of(first.array)
        total = _added_up([xp.cast(xp.round_to(x, first.wire), "float32") for x in arrays])
        return xp.cast(xp.round_to(total, first.wire), xp.dtype(first.array))

    def carrying(self, arrays: Sequence[Array]) -> Any:
        return dataclasses.replace(self, array=arrays[0], owned=False, narrow=False)

    def widened(self, array: Array) -> Any:
        return dataclasses.replace(self.carrying([array]), wire=self.wire or "bfloat16")


@dataclasses.dataclass(eq=False)
class Max(Dense):
    """Take the element-wise maximum of ``array`` over the ranks.  Ranks compare method, options
    and step with it (:mod:`hvd_compress.agreement`).  Methods of users may share a scale by it.

    >>> Max.reply([Max(np.array([1.0, 5.0])), Max(np.array([2.0, 3.0]))], rank=0)
    array([2., 5.])
    """

    @classmethod
    def _combined(cls, requests: Sequence[Any]) -> Any:
        xp, result = backend_of(requests[0].array), requests[0].array
        for request in requests[1:]:
            result = xp.maximum(result, request.array)
        return result


@dataclasses.dataclass(eq=False)
class Broadcast(Dense):
    """Replace ``array`` by that of rank ``root``, bit for bit.  All ranks' arrays have the same
    shape and dtype, and name the same root, which may be another one in each step.  The reply may
    be the array itself on the root.

    >>> Broadcast.reply([Broadcast(np.array([i]), root=1) for i in range(3)], rank=0)
    array([1])
    """

    root: int

    reckons = False
    shared = ("root",)
    nbytes = 0  # who knows the rank knows whether it sends

    def count(self, reply: Any, rank: int, size: int) -> tuple[Any, Any]:
        nbytes = super().nbytes
        return (nbytes, 0) if rank == self.root else (0, nbytes)

    @classmethod
    def _combined(cls, requests: Sequence[Any]) -> Any:
        roots = {request.root for request in requests}
        if len(roots) > 1 or not roots <= set(range(len(requests))):
            raise CompressionError(f"the roots of {len(requests)} ranks are {sorted(roots)}")
        return requests[roots.pop()].array


def itemsize(dtype: str) -> int:
    """Bytes of an element, by NumPy's names and "bfloat16"."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def _added_up(arrays: Sequence[Array]) -> Array:
    total = arrays[0]
    with np.errstate(invalid="ignore"):  # Inf of one rank and -Inf of another
        for array in arrays[1:]:
            total = total + array
    return total
