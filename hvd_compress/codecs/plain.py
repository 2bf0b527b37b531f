"""Numbers as they are, where a frame is wanted around them."""

from __future__ import annotations

import dataclasses

import numpy as np

from hvd_compress.codecs.base import Codec
from hvd_compress.operators.classes import IDENTITY, Classes


@dataclasses.dataclass(frozen=True)
class plain(Codec, name="plain"):
    """All bits of all numbers."""

    def size(self, n: int, dtype: np.dtype) -> int:
        return n * dtype.itemsize

    def encode(self, x: np.ndarray, random: np.random.Generator) -> np.ndarray:
        return np.frombuffer(x.astype(x.dtype.newbyteorder("<")).tobytes(), np.uint8)

    def decode(self, code: np.ndarray, n: int, dtype: np.dtype) -> np.ndarray:
        return np.frombuffer(code.tobytes(), dtype.newbyteorder("<")).astype(dtype)

    def classes(self, d: int) -> Classes:
        return IDENTITY
