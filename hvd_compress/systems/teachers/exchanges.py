"""Teachers, and the messages that they send each other."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array
from hvd_compress.errors import ConfigError, MismatchError
from hvd_compress.requests import Neighbors
from hvd_compress.systems.base import Arrays, Groups, like
from hvd_compress.systems.rounds.leader_sgd import pack, unpack
from hvd_compress.wire.content import decode_bytes, encode_bytes

Exchange = Generator[Neighbors, Any, Any]
#: of predictions: the fingerprint of the inputs, the dtype, and the number of dimensions
_HEADER = struct.Struct("<IBB")
_DTYPES = ("float16", "float32", "float64")
_PREDICTIONS, _PARAMETERS = "predictions", "parameters of a teacher"


class Counterparts(NamedTuple):
    """With whom a rank exchanges.

    Attributes:
        sources: one rank of each other group, in the order of the groups: its teachers.
        targets: the ranks of which this one is the teacher.
        place: this rank's place in its group.
        places: the number of ranks in its group.

    >>> Counterparts.of(((0, 1), (2, 3)), rank=1)
    Counterparts(sources=(3,), targets=(3,), place=1, places=2)
    """

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    place: int
    places: int

    @classmethod
    def of(cls, groups: Groups, rank: int) -> Counterparts:
        """Return the counterparts of a rank: the rank at the same place of each other group.
        Groups with fewer ranks are counted round."""
        own = next(group for group in groups if rank in group)
        place = own.index(rank)
        others = [group for group in groups if group is not own]
        sources = tuple(group[place % len(group)] for group in others)
        targets = tuple(
            r for group in others for i, r in enumerate(group) if own[i % len(own)] == rank
        )
        return cls(sources, targets, place, len(own))


def exchange_predictions(
    own: Array, peers: Counterparts, values: str | None, fingerprint: int
) -> Exchange:
    """Return the teachers' predictions in the dtype of ``own``, in their order.

    Args:
        own: this model's predictions, floats of any shape.
        values: the dtype in which they are sent; ``None`` for their own.
        fingerprint: a number from the inputs, 1 or more; 0 if it is not known.

    Raises:
        MismatchError: a teacher's predictions have another shape or dtype, or are of other inputs.
    """
    xp = backend_of(own)
    dtype = _sent_as(xp.dtype(own), values)
    shape = xp.shape(own)
    header = _HEADER.pack(fingerprint, _DTYPES.index(dtype), len(shape))
    header += struct.pack(f"<{len(shape)}q", *shape)
    body = xp.to_numpy(xp.reshape(xp.cast(own, dtype), (xp.size(own),))).tobytes()
    message = xp.from_numpy(encode_bytes(header + body, _PREDICTIONS), own)
    replies = yield Neighbors(message, peers.targets, peers.sources, equal_sizes=False)
    found = []
    for rank, reply in zip(peers.sources, replies, strict=True):
        frame = xp.to_numpy(reply)
        theirs = decode_bytes(frame, _PREDICTIONS, sender=f"rank {rank}").tobytes()
        _check(header, theirs, rank)
        flat = xp.from_numpy(np.frombuffer(theirs[len(header) :], dtype).copy(), own)
        found.append(xp.reshape(xp.cast(flat, xp.dtype(own)), shape))
    return found


def _check(header: bytes, theirs: bytes, rank: int) -> None:
    own_look, their_look = _look(header), _look(theirs)
    if own_look[1:] != their_look[1:]:
        raise MismatchError(
            f"this rank has predictions of {own_look[1]} {own_look[2]}, and rank {rank} of "
            f"{their_look[1]} {their_look[2]}: ranks that exchange predictions must have the same "
            "batches, for instance from CoordinatedSampler, without a smaller one at the end"
        )
    if own_look[0] and their_look[0] and own_look[0] != their_look[0]:
        raise MismatchError(
            f"the inputs of this rank and of rank {rank} differ: ranks that exchange predictions "
            "must see the same examples in the same order and with the same augmentation; use "
            "CoordinatedSampler, or exchange='checkpoints', which needs no common batches"
        )


def _look(message: bytes) -> tuple[int, str, tuple[int, ...]]:
    fingerprint, dtype, n = _HEADER.unpack_from(message)
    return fingerprint, _DTYPES[dtype], struct.unpack_from(f"<{n}q", message, _HEADER.size)


def exchange_checkpoints(own: Arrays, peers: Counterparts, values: str | None) -> Exchange:
    """Return the teachers' arrays by name, in the order of the teachers.

    Args:
        own: floats, with the same names, shapes and dtypes on all ranks.
        values: the dtype in which they are sent; ``None`` for their own.
    """
    first = next(iter(own.values()))
    xp = backend_of(first)
    on_wire = {
        name: backend_of(x).cast(x, _sent_as(backend_of(x).dtype(x), values))
        for name, x in own.items()
    }
    flat = pack(on_wire)
    body = b"".join(xp.to_numpy(part).tobytes() for part in flat)
    message = xp.from_numpy(encode_bytes(body, _PARAMETERS), first)
    frames = yield Neighbors(message, peers.targets, peers.sources)
    replies = [
        decode_bytes(xp.to_numpy(frame), _PARAMETERS, sender=f"rank {rank}", size=len(body))
        for rank, frame in zip(peers.sources, frames, strict=True)
    ]
    return [_unpacked(reply, flat, on_wire, own) for reply in replies]


def _unpacked(reply: np.ndarray, flat: Sequence[Array], on_wire: Arrays, own: Arrays) -> Arrays:
    parts, start = [], 0
    for part in flat:
        xp = backend_of(part)
        array = np.empty(xp.size(part), xp.dtype(part))
        array.view(np.uint8)[:] = reply[start : start + array.nbytes]
        parts.append(xp.from_numpy(array, part))
        start += array.nbytes
    found = unpack(parts, on_wire)
    return {name: like(x, own[name]) for name, x in found.items()}


def _sent_as(dtype: str, values: str | None) -> str:
    """Return the dtype on the wire; NumPy, through which bytes go, has no bfloat16."""
    found = values or ("float32" if dtype == "bfloat16" else dtype)
    if found not in _DTYPES:
        raise ConfigError(f"predictions and parameters must be floats; got {dtype}")
    return found


def fingerprint_of(inputs: Sequence[np.ndarray]) -> int:
    """Return a number from 1 that differs for other inputs, but for one case in 2^32; 0 of none."""
    if not inputs:
        return 0
    found = 0
    for x in inputs:
        found = zlib.crc32(np.ascontiguousarray(x).tobytes(), found)
    return found or 1
