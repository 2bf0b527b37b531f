"""The codes of many runs of one flat array, wherever that is.

In host memory compiled loops make them, on a GPU kernels that take all runs at once.  Both have the
bits of the codecs' NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hvd_compress.codecs import Codec
from hvd_compress.errors import UnsupportedError
from hvd_compress.kernels import loops_of, threads

_FLOAT32 = np.dtype(np.float32)


class RunsOnHost:
    """Codes of runs of elements of a flat array (float32), each at its place in an array of bytes
    (uint8).  Arrays are on the device of the runs, and nothing waits for it."""

    def __init__(
        self, codecs: Sequence[Codec], spans: Sequence[slice], places: Sequence[int]
    ) -> None:
        self._runs = [
            (
                codec,
                codec.bound(),
                span,
                slice(at, at + codec.size(span.stop - span.start, _FLOAT32)),
            )
            for codec, span, at in zip(codecs, spans, places, strict=True)
        ]

    def encode(self, x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """Write the codes of ``x``, and into ``x`` what they leave out of it.  Return 0 (float32,
        no dimensions), or NaN if ``x`` is not finite: then codes are anything."""
        values, code, count, fine = x.numpy(), codes.numpy(), threads(), True
        for _, bound, span, place in self._runs:
            own = values[span]
            fine &= bound.feed(own, None, None, [], None, own, code[place], count)[0]
        return torch.tensor(0.0 if fine else math.nan)

    def read(
        self, codes: torch.Tensor, out: torch.Tensor, add: bool = False, ranks: int = 1
    ) -> None:
        """Write the values of codes into ``out``, or add them.  If codes of several ranks are end
        to end, their sum in the order of the ranks."""
        values, count = out.numpy(), threads()
        theirs = codes.numpy().reshape(ranks, -1)
        for codec, bound, span, place in self._runs:
            own = [row[place] for row in theirs]
            if add:
                for code in own:
                    codec.decode_to(code, values[span], add=True)
            else:
                bound.mean(own, 1, values[span], True, count)


class RunsOnGPU(NamedTuple):
    """See :class:`RunsOnHost`."""

    codes: Any

    def encode(self, x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        notes = self.codes.encode(x, [], codes)
        self.codes.read(codes, x, self.codes.TAKE_OFF)
        flags = notes.view(len(self.codes.layout), -1)[:, 0]  # of runs that are not finite
        return torch.where(flags.any(), math.nan, 0.0)

    def read(
        self, codes: torch.Tensor, out: torch.Tensor, add: bool = False, ranks: int = 1
    ) -> None:
        if not add:
            out.zero_()
        self.codes.read(codes, out, self.codes.ADD, ranks)


Runs = RunsOnHost | RunsOnGPU


def runs_of(
    codecs: Sequence[Codec],
    spans: Sequence[slice],
    places: Sequence[int],
    like: torch.Tensor,
) -> Runs:
    """Return the runs for arrays in the memory of ``like``.

    Args:
        codecs, spans, places: of each run; the first bytes of codes are multiples of 4.

    Raises:
        UnsupportedError: there are no loops for that memory.
    """
    loops = loops_of(like)
    if loops is None:
        raise UnsupportedError(
            f"compress_shards has codes for CPUs and for CUDA GPUs with Triton, and the model is "
            f"on {like.device}: take 'bf16', which needs none"
        )
    if hasattr(loops, "Codes"):
        return RunsOnGPU(loops.Codes(codecs, spans, like, places))
    return RunsOnHost(codecs, spans, places)
