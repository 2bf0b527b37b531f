"""The header of 16 bytes that all messages begin with, little-endian.

Its fields are "HC", the version, the :class:`Kind`, two bytes and a tag of two more, the number of
entries (u32), and a CRC-32.  Each kind has a meaning for the two bytes and the tag.  The CRC covers
the 12 bytes before it and everything after the header.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hvd_compress.errors import PayloadError
from hvd_compress.kernels import crc32

_FIELDS = struct.Struct("<2sBBBBHI")
_MAGIC, VERSION = b"HC", 3
#: bytes of the header
START = _FIELDS.size + 4

#: makes the error of a problem
Fail = Callable[[str], PayloadError]


class Kind(enum.IntEnum):
    """The kinds of messages."""

    SPARSE = 1  # some elements: wire/frame.py
    DENSE = 2  # all of them
    CODED = 3  # values in the codes of a codec: codecs/frame.py
    ROWS = 4  # of a matrix: wire/rows.py
    SERVER = 5  # of a parameter server and its workers
    BUCKET = 6  # values of several tensors in codes: fused/coded_plan.py
    CONTENT = 7  # bytes that are no gradient: wire/content.py
    BLOCKS = 8  # elements of several tensors, selected on a GPU: torch_impl/triton/loops.py


class Header(NamedTuple):
    """The fields of a header; see the module's docstring."""

    kind: Kind
    first: int
    second: int
    tag: int
    number: int

    def packed(self) -> bytes:
        """Return the bytes in front of the checksum."""
        if self.number >= 2**32:
            raise PayloadError(f"{self.number} entries do not fit in one message; split the tensor")
        return _FIELDS.pack(_MAGIC, VERSION, *self)

    def seal(self, frame: np.ndarray) -> np.ndarray:
        """Write this header and the checksum into a frame (1-D, uint8); return the frame."""
        return seal(frame, self.packed())


def seal(frame: np.ndarray, header: bytes) -> np.ndarray:
    """Write a header (:meth:`Header.packed`) and the checksum into a frame; return the frame."""
    frame[: _FIELDS.size] = np.frombuffer(header, np.uint8)
    frame[_FIELDS.size : START].view("<u4")[0] = _checksum(frame)
    return frame


def header_in(frame: np.ndarray) -> bytes | None:
    """Return the header of a frame that arrived as :meth:`Header.packed` does; ``None`` unless its
    checksum matches."""
    if frame.size < START or _checksum(frame) != frame[_FIELDS.size : START].view("<u4")[0]:
        return None
    return frame[: _FIELDS.size].tobytes()


def opened(frame: np.ndarray, *kinds: Kind, fail: Fail) -> Header:
    """Return the header of a frame that arrived, after its checksum was compared.

    Raises:
        PayloadError: the frame is damaged, of another version or of no such kind; made by ``fail``.
    """
    if frame.size < START:
        raise fail(f"{frame.size} bytes are less than a header")
    if _checksum(frame) != int.from_bytes(frame[_FIELDS.size : START].tobytes(), "little"):
        raise fail("its checksum does not match")
    magic, version, kind, *rest = _FIELDS.unpack(frame[: _FIELDS.size].tobytes())
    if (magic, version) != (_MAGIC, VERSION) or kind not in kinds:
        names = " or ".join(kind.name.lower() for kind in kinds)
        raise fail(f"no header of a {names} frame, version {VERSION}, at its start")
    return Header(Kind(kind), *rest)


def failing(sender: str, causes: str, what: str = "payload") -> Fail:
    """Return what makes the errors of messages of a ``sender``; ``causes`` may be wrong if nothing
    was damaged."""
    return lambda problem: PayloadError(
        f"bad {what} from {sender}: {problem}. Either the message was damaged on its way, or "
        f"{causes}"
    )


def padded(body: int) -> int:
    """Return the bytes of a frame, a multiple of 8, given the bytes after its header."""
    return START + body + -body % 8


def length_tag(n: int) -> int:
    """Return the tag by which frames of vectors of other lengths are noticed: the length modulo the
    largest prime of 16 bits."""
    return n % 65521


def _checksum(frame: np.ndarray) -> int:
    return crc32(frame[START:], zlib.crc32(frame[: _FIELDS.size].data))
