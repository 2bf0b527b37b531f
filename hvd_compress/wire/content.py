"""The frame of bytes that are no gradient: see docs/wire-format.md#other-bytes."""

from __future__ import annotations

import zlib

import numpy as np

from hvd_compress.errors import MismatchError
from hvd_compress.wire.header import START, Header, Kind, failing, opened, padded

_CAUSES = "the ranks do not run the same version with the same options"


def encode_bytes(content: np.ndarray | bytes, what: str) -> np.ndarray:
    """Return a frame (1-D, uint8) of bytes (the same, or ``bytes``).

    Args:
        what: names them, the same on sender and receiver.
    """
    raw = np.frombuffer(content, np.uint8) if isinstance(content, bytes) else content
    frame = np.zeros(padded(raw.size), np.uint8)
    frame[START : START + raw.size] = raw
    return _header(raw.size, what).seal(frame)


def decode_bytes(
    frame: np.ndarray, what: str, *, sender: str, size: int | None = None
) -> np.ndarray:
    """Return the bytes (1-D, uint8), a view into the frame.

    Args:
        size: how many there must be; ``None`` if only the sender knows.
    """
    fail = failing(sender, _CAUSES, what)
    header = opened(frame, Kind.CONTENT, fail=fail)
    body = frame.size - START
    count = body - (body - header.number) % 2**32
    if count < 0 or frame.size != padded(count) or size not in (None, count):
        raise fail(f"{body} bytes where {header.number if size is None else size} were expected")
    if header != _header(count, what):
        raise MismatchError(
            f"{sender} sends something else where this rank has: {what}. All ranks must make the "
            "same calls, with the same options, shapes and dtypes"
        )
    return frame[START : START + count]


def decode_end_to_end(frames: np.ndarray, what: str) -> list[bytes]:
    """Return the bytes of the frames of all ranks, which lie end to end in their order."""
    found: list[bytes] = []
    while frames.size:
        head = frames[:START].tobytes()
        size = padded(int.from_bytes(head[8:12], "little"))  # if wrong, the checksum is
        sender = f"rank {len(found)}"
        found.append(decode_bytes(frames[:size], what, sender=sender).tobytes())
        frames = frames[size:]
    return found


def _header(count: int, what: str) -> Header:
    crc = zlib.crc32(what.encode())
    return Header(Kind.CONTENT, crc & 255, crc >> 8 & 255, crc >> 16, count % 2**32)
