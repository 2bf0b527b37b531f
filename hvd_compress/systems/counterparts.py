"""Teachers, and the messages that they send each other."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array
from hvd_compress.errors import ConfigError
from hvd_compress.requests import Neighbors
from hvd_compress.systems.base import Arrays, groups_of, like
from hvd_compress.systems.leader_sgd import pack, unpack
from hvd_compress.wire.content import decode_bytes, encode_bytes

_DTYPES = ("float16", "float32", "float64")
_SENT = "arrays of a teacher"


class Counterparts(NamedTuple):
    """With whom a rank exchanges.

    Attributes:
        sources: one rank of each other group, in the order of the groups: its teachers.
        targets: the ranks of which this one is the teacher.

    >>> Counterparts.of(2, rank=1, size=4)
    Counterparts(sources=(3,), targets=(3,))
    """

    sources: tuple[int, ...]
    targets: tuple[int, ...]

    @classmethod
    def of(cls, in_group: int, rank: int, size: int) -> Counterparts:
        """Return the counterparts of a rank: the rank at the same place of each other group of
        ``in_group`` ranks.  The last group may have fewer, which are counted round."""
        groups = groups_of(in_group, size)
        own = next(group for group in groups if rank in group)
        place = own.index(rank)
        others = [group for group in groups if group is not own]
        sources = tuple(group[place % len(group)] for group in others)
        targets = tuple(
            r for group in others for i, r in enumerate(group) if own[i % len(own)] == rank
        )
        return cls(sources, targets)


def exchange(
    own: Arrays, peers: Counterparts, values: str | None
) -> Generator[Neighbors, Any, list[Arrays]]:
    """Return the teachers' arrays by name, in the order of the teachers.

    Args:
        own: floats, with the same names, shapes and dtypes on all ranks: of the model, or its
            predictions.
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
    message = xp.from_numpy(encode_bytes(body, _SENT), first)
    frames = yield Neighbors(message, peers.targets, peers.sources)
    replies = [
        decode_bytes(xp.to_numpy(frame), _SENT, sender=f"rank {rank}", size=len(body))
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


def fingerprint_of(inputs: Sequence[np.ndarray]) -> str:
    """Return a text that differs for other inputs, but for one case in 2^32."""
    found = 0
    for x in inputs:
        found = zlib.crc32(np.ascontiguousarray(x).tobytes(), found)
    return f"{found:08x}" if inputs else "unknown"
