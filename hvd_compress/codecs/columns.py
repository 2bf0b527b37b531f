"""Codecs whose runs are columns of a matrix."""

from __future__ import annotations

import dataclasses
import math

from hvd_compress.codecs.base import Codec
from hvd_compress.config import is_whole
from hvd_compress.errors import ConfigError

#: the means or scales of fewer elements would weigh more than their codes, and too many elements
#: for one rank to own would share theirs
_SHORTEST, _LONGEST = 64, 4096


class Columns(Codec):
    """Subclasses are dataclasses with the option ``column``, the number of elements in a column;
    the last column of an array is as long as it gets."""

    column: int | None

    def _check_column(self) -> None:
        column = self.column
        if column is not None and (not is_whole(column) or column < 1):
            raise ConfigError(f"column must be a number of elements, or None; got {column!r}")

    def for_shape(self, shape: tuple[int, ...]) -> Columns:
        if self.column is not None:
            return self
        length = max(1, math.prod(shape[1:]) if len(shape) > 1 else math.prod(shape))
        if length < _SHORTEST:
            length *= -(-_SHORTEST // length)
        parts = -(-length // _LONGEST)
        return dataclasses.replace(self, column=-(-length // parts))  # type: ignore[type-var]

    def unit(self, n: int) -> int:
        return self.column or max(n, 1)
