"""The bytes that one rank sends to another of a module: a row, with the place of each parameter."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from hvd_compress.codecs import Codec, linear
from hvd_compress.errors import UnsupportedError

from .fsdp import ShardedParameter
from .shard_runs import Runs, runs_of

_FLOAT32 = np.dtype(np.float32)
#: of a row: 0, or NaN if what is coded in it was not finite (float32)
HEADER = 4
#: of residuals, see :class:`hvd_compress.torch.ddp.shard_hops.Hop`
RESIDUAL = linear(bits=8, column=512)


class Field(NamedTuple):
    """The place of a parameter: its elements in a row of numbers, and its bytes in a row of
    bytes."""

    span: slice
    bytes: slice


class RowLayout:
    """The layout of a row: a header, codes, and what is sent as it is; all begin at multiples of 4.

    Args:
        elements: the numbers of a row.
        coded, plain: the elements of each part that is coded, and of each that is sent as it is.
        codec: of the former.
        wire: the dtype of the latter.

    Attributes:
        size: the bytes of a row.
        coded, plain: the places of the parts, by name.
        codecs: of coded parts.
    """

    def __init__(
        self,
        elements: int,
        coded: Mapping[str, slice],
        plain: Mapping[str, slice],
        codec: Codec | None,
        wire: torch.dtype,
    ) -> None:
        self.elements, self.wire, self._end = elements, wire, HEADER
        lengths = [span.stop - span.start for span in coded.values()]
        self.codecs = [] if codec is None else [codec.for_shape((n,)) for n in lengths]
        pairs = zip(self.codecs, lengths, strict=True)
        self.coded = self._placed(coded, [its.size(n, _FLOAT32) for its, n in pairs])
        sizes = [(span.stop - span.start) * wire.itemsize for span in plain.values()]
        self.plain = self._placed(plain, sizes)
        self.size = self._end

    @staticmethod
    def of(parts: Sequence[ShardedParameter], codec: Codec | None, wire: torch.dtype) -> RowLayout:
        """Return the layout of all parts of a module; without a codec nothing is coded."""
        starts = [0, *itertools.accumulate(part.elements for part in parts)]
        coded: dict[str, slice] = {}
        plain: dict[str, slice] = {}
        for part, start in zip(parts, starts[:-1], strict=True):
            if part.elements:
                where = plain if codec is None or part.is_exempt else coded
                where[part.name] = slice(start, start + part.elements)
        return RowLayout(starts[-1], coded, plain, codec, wire)

    def _placed(self, spans: Mapping[str, slice], sizes: Sequence[int]) -> dict[str, Field]:
        found = {}
        for (name, span), size in zip(spans.items(), sizes, strict=True):
            found[name] = Field(span, slice(self._end, self._end + size))
            self._end += size + -size % 4
        return found

    def of_what_waits(self) -> RowLayout:
        """Return the layout of residuals of what is coded."""
        spans = {name: place.span for name, place in self.coded.items()}
        return RowLayout(self.elements, spans, {}, RESIDUAL, self.wire)

    def bytes_of(self) -> dict[str, int]:
        """Return the bytes of each part; the first has the header and all padding."""
        found = {
            name: place.bytes.stop - place.bytes.start
            for name, place in {**self.coded, **self.plain}.items()
        }
        if found:
            found[next(iter(found))] += self.size - sum(found.values())
        return found

    def runs(self, starts: Sequence[int], places: Sequence[int], like: torch.Tensor) -> Runs:
        """Return the runs of several rows, whose numbers and bytes begin at these."""
        pairs = [
            (a, b, p) for a, b in zip(starts, places, strict=True) for p in self.coded.values()
        ]
        spans = [slice(a + p.span.start, a + p.span.stop) for a, _, p in pairs]
        return runs_of(
            self.codecs * len(starts), spans, [b + p.bytes.start for _, b, p in pairs], like
        )

    def put_plain(self, x: torch.Tensor, rows: torch.Tensor) -> None:
        """Write what is not coded of numbers, of shape (..., elements), into rows of bytes, of
        shape (..., size)."""
        whole = rows.view(self.wire)
        for place in self.plain.values():
            whole[..., self._of(place)] = x[..., place.span].to(self.wire)

    def add_plain(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Write the sums (float32) over the first dimension of rows of bytes."""
        whole = rows.view(self.wire)
        for place in self.plain.values():
            torch.sum(whole[..., self._of(place)], 0, dtype=torch.float32, out=out[..., place.span])

    def take_plain(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Write what is not coded into numbers, see :meth:`put_plain`."""
        whole = rows.view(self.wire)
        for place in self.plain.values():
            out[..., place.span] = whole[..., self._of(place)]

    def _of(self, place: Field) -> slice:
        return slice(
            *(edge // self.wire.itemsize for edge in (place.bytes.start, place.bytes.stop))
        )


def check_wire(dtype: torch.dtype, what: str) -> None:
    """Raise ``UnsupportedError`` if numbers of a dtype are not sent."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise UnsupportedError(
            f"compress_shards takes float32, bfloat16 and float16, and {what} are {dtype}: set "
            "fully_shard(..., mp_policy=MixedPrecisionPolicy(...)), or leave this module out"
        )
