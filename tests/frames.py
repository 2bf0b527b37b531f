"""Damage that no checksum tells."""

import zlib

import numpy as np


def sealed(frame):
    """A frame with the checksum that belongs to its bytes."""
    frame = frame.copy()
    crc = zlib.crc32(frame[:12].tobytes() + frame[16:].tobytes())
    frame[12:16] = np.frombuffer(crc.to_bytes(4, "little"), np.uint8)
    return frame
