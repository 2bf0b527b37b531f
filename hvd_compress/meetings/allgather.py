"""Every rank's elements or codes are gathered by every rank, which adds them up in rank order."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Coding, Context, Encoded, Form, Sparse, State
from hvd_compress.chain import Aggregated, Aggregation, Aggregator, Transform
from hvd_compress.codecs import Codec, Selector, logarithmic, random_k, top_k
from hvd_compress.codecs.selector import Classes
from hvd_compress.config import choice, converted
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.fused import FusedCodes, FusedElements, FusedTopK, dense_is_less
from hvd_compress.meetings.averaging import gathered, summed, summed_densely, whole
from hvd_compress.meetings.codes import codes
from hvd_compress.meetings.elements import as_values, elements
from hvd_compress.meetings.sparse_vectors import add_up
from hvd_compress.requests import SparseSum
from hvd_compress.requests.algorithms import SPARSE_SUMS
from hvd_compress.transforms import error_feedback, momentum_correction
from hvd_compress.wire.frame import CODECS


@dataclasses.dataclass(frozen=True)
class allgather(Aggregator, name="allgather"):
    """Gather the elements that ``select`` picks, or all of them, coded, and add them in rank order.

    Options:
        select: an operator that picks elements, such as ``top_k``; or a codec, which takes all.
        values, indices: as of :class:`elements`; error feedback keeps what values lose.
        algorithm: "allgather" delivers all entries to every rank.  Over MPI also
            "split_allgather", where each rank adds up one region, "hierarchical", inside of nodes
            first, and "auto": see docs/sparse-collectives.md.

    P messages may be more than two dense arrays, for instance at a density of 25 % on more than 4
    ranks.  Then uncoded values at known numbers of places are sent in a dense sum.  The result is
    the same up to the order of additions.

    Raises:
        TypeError: ``select`` is ``random_k``, which :class:`allreduce` and :class:`gather_drawn`
            send without indices, or is no operator.
        ConfigError: codes by an algorithm that adds values on their way.

    >>> world = World(chain(via=allgather(top_k(0.25))), size=2)
    >>> world.exchange([np.array([4.0, 1.0, 0.0, 2.0]), np.array([1.0, 0.0, 6.0, 3.0])])[0].mean
    array([2., 0., 3., 0.])
    """

    select: Selector | Codec = top_k()
    values: str | Codec = dataclasses.field(default="float32", metadata=converted(as_values))
    algorithm: str = choice(*SPARSE_SUMS, default="allgather")
    indices: str = choice(*CODECS, default="packed")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.algorithm != "allgather" and not (
            isinstance(self.select, Selector) and isinstance(self.values, str)
        ):
            raise ConfigError(
                f"algorithm={self.algorithm!r} adds plain values on their way, and codes cannot be "
                "added: algorithm='allgather'"
            )
        if not isinstance(self.select, Selector | Codec) or isinstance(self.select, random_k):
            raise TypeError(
                "allgather(select=...) takes an operator such as top_k(), or a codec; got "
                f"{self.select!r}"
            )
        if isinstance(self.select, Codec) and self.values != "float32":
            raise TypeError(
                f"allgather({self.select.name}(), values=...): the values are coded already"
            )

    def check_feedback(self, shape: tuple[int, ...], context: Context) -> None:
        n = math.prod(shape)
        if isinstance(self.select, Codec):
            self.select.for_shape(shape).check_feedback(n)
        elif isinstance(self.values, Codec):
            self.values.check_feedback(self.select.count(n, context) or n)

    def classes(self, d: int, context: Context | None = None) -> Classes:
        """Return the constants of the operator, of the codec, or of the one followed by the other.

        Codes of top-k have alpha k/d times the codec's, its beta, and d/k times its delta.
        Rounding float64 to float32 is not counted.
        """
        if isinstance(self.select, Codec):
            return self.select.classes(d)
        if self.values == "float16":
            raise UnsupportedError("float16 has no constants: it loses what is below 2^-25")
        if not isinstance(self.values, Codec):
            return self.select.classes(d, context)
        context = context or Context()
        k = self.select.count(d, context)
        codes = self.values.classes(d if k is None else k)
        return codes if k == d else codes.after_selecting(self.select.kept(d, context))

    def fused(self, transforms: Sequence[Transform], context: Context) -> Form | None:
        if isinstance(self.select, Codec):
            return FusedCodes.of(transforms, context, self.select, True)
        if not isinstance(self.values, str | logarithmic) or self.algorithm != "allgather":
            return None
        how = self.select, self.values, self.indices
        if not isinstance(self.select, top_k):
            # How many are selected may be all that says how many codes there are.
            plain = isinstance(self.values, str)
            return FusedElements.of(transforms, context, *how) if plain else None
        *before, last = transforms or (None,)
        correction, nesterov = None, False
        if before and isinstance(last_before := before[-1], momentum_correction):
            correction = last_before
            del before[-1]
            _, nesterov = correction.in_use(context)
        if not isinstance(last, error_feedback) or any(t.elementwise for t in before):
            return FusedElements.of(transforms, context, *how)
        if last.units != "gradient" or any(t.keys for t in before):
            return None
        return FusedTopK(tuple(before), self.select, correction, nesterov, *how[1:])

    def coding(self, n: int, context: Context) -> Coding:
        if isinstance(self.select, Codec):
            return codes(self.select.for_shape(context.shape))
        if self.select.count(n, context) != n:
            return self._elements
        return codes(self.values) if isinstance(self.values, Codec) else whole()

    @functools.cached_property
    def _elements(self) -> elements:
        assert isinstance(self.select, Selector)
        return elements(self.select, self.values, self.indices)

    def aggregate(self, x: Array, state: State, context: Context) -> Aggregation:
        n = backend_of(x).size(x)
        coding = self.coding(n, context)
        if isinstance(coding, whole):
            return (yield from summed(x, state, context))
        if isinstance(coding, codes):
            return (yield from gathered(coding, coding.encode(x, state, context), x, context))
        picked = self._elements.pick(x, context)
        if self.algorithm != "allgather":
            return (yield from self._by_algorithm(x, picked, state, context))
        k = self._elements.select.count(n, context)
        is_known = isinstance(self.values, str) and k is not None
        if is_known and dense_is_less(n, k or 0, str(self.values), context.size):
            own = self._elements.rounded(picked)
            return (yield from summed_densely(own, x, state, context))
        encoded = Encoded(*self._elements.pack(picked, x, context), state)
        return (yield from gathered(coding, encoded, x, context))

    def _by_algorithm(self, x: Array, own: Sparse, state: State, context: Context) -> Aggregation:
        """The engine adds vectors up on their way; what it has to round off stays here."""
        xp = backend_of(x)
        n, dtype = xp.size(x), xp.dtype(x)
        wire = None if self.values == "float32" else str(self.values)
        own = own._replace(values=xp.round_to(own.values, wire, saturate=True))
        total, dropped, *_ = yield SparseSum(own, n, wire, self.algorithm)

        def arrived(*parts: np.ndarray) -> list[np.ndarray]:
            mine, lost = Sparse(*parts[:2]), Sparse(parts[2], -parts[3])
            return list(add_up([mine, lost], n, dtype))

        looks = [("int64", None), (dtype, None)]
        sent = Sparse(*xp.on_host(arrived, [*own, *dropped], looks, x))
        return Aggregated(xp.divided(total, context.size), sent, xp.all_finite(total), state)
