"""The largest cosine coefficients of every rank, and their mean over those that sent them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Generator
from typing import Any

from hvd_compress.aggregators.meetings import gathered, summed
from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, State
from hvd_compress.chain import Aggregated, Aggregator
from hvd_compress.coding import Coding, cosine_elements, whole
from hvd_compress.requests import Request


@dataclasses.dataclass(frozen=True)
class dct_top_k(Aggregator, name="dct_top_k"):
    """Cut the tensor into chunks, and send the ``top_k`` largest coefficients of each chunk's
    discrete cosine transform (DCT-II, orthonormal, of two dimensions).

    The direction of the step is not the average over the ranks, but for each coefficient the mean
    over those that sent it: what one rank alone sent counts in full.

    Chunks, messages and the options ``chunk``, ``top_k``, ``values`` and ``indices`` are those of
    :class:`hvd_compress.coding.cosine_elements`.  Tensors of which the coefficients and their
    places would take more bytes than the tensor are summed whole.

    Reference: Peng, Quesnelle, Kingma, DeMo, arXiv 2411.19870.  Differs from the released code in:
    contributions are added in the order of the ranks, so that all ranks hold the same bits; the
    matrix is not always that of the first dimension and all others; indices are packed.

    A constant that one rank sends, and the other does not:

    >>> wave = np.ones((8, 1)) * np.cos(np.pi * (np.arange(8) + 0.5) / 8)
    >>> world = World(chain(via=dct_top_k(chunk=8, top_k=1)), size=2)
    >>> outcome = world.exchange([np.full((8, 8), 3.0), wave])[0]
    >>> outcome.mean.mean().round(6).item(), outcome.direction.mean().round(6).item()
    (1.5, 3.0)
    """

    chunk: int = 64
    top_k: int = 32
    values: str = "float32"
    indices: str = "packed"

    def __post_init__(self) -> None:
        _ = self._coefficients  # checks the options

    @functools.cached_property
    def _coefficients(self) -> cosine_elements:
        return cosine_elements(self.chunk, self.top_k, self.values, self.indices)

    def coding(self, n: int, context: Context) -> Coding:
        return self._coefficients if self._coefficients.saves(n, context) else whole()

    def aggregate(
        self, x: Array, state: State, context: Context
    ) -> Generator[Request, Any, Aggregated]:
        coding = self.coding(backend_of(x).size(x), context)
        if coding is not self._coefficients:
            return (yield from summed(x, state, context))
        return (yield from gathered(coding, coding.encode(x, state, context), x, context))
