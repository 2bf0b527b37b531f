"""The loops of :mod:`hvd_compress.kernels.codecs` in Triton, for a GPU's memory: the same bits.

Each kind turns numbers into codes (uint8), and back, of many runs of elements at once.  Random
numbers are those of the counter-based generator, which each program computes from its place in the
stream.  The host waits for nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import ArrayLike

from hvd_compress.codecs import Codec
from hvd_compress.codecs.ternary import Ternary
from hvd_compress.kernels import is_compiled
from hvd_compress.kernels.bitpacking import digits_of_a_word, field_of
from hvd_compress.kernels.codecs import Digits, Halves, Natural, Signs, place_of, words_of

from ..backend import from_numpy
from . import codec_kernels as kernels
from . import sum_kernels as terms
from .codec_kernels import INFINITE, NOTES, WRITE
from .sums import limits_of, of_sums, pairs_of_means, scales, sums
from .task_kernels import CODE, START
from .tasks import EXACT, WIDTH, Layout, Span

#: places within a tensor and its code are 32-bit integers
_MOST = 2**30
_FLOAT32 = np.dtype(np.float32)
_LOOPS = (Digits, Ternary, Natural, Signs, Halves)
_KINDS = {
    "linear": kernels.LINEAR,
    "uniform": kernels.UNIFORM,
    "exponential": kernels.EXPONENTIAL,
    "ternary": kernels.TERNARY,
    "float8": kernels.FLOAT8,
}


class Codes:
    """The codes of runs of elements of a flat array, all at once; codecs differ in the length of
    their runs at most.

    Args:
        codecs, spans: of the runs.
        like: a tensor on the GPU.
        places: the first byte of each run's code, multiples of 4.

    Attributes:
        layout: the tables of the kernels.
    """

    #: what :meth:`read` does with values, unless it writes them
    ADD, TAKE_OFF = kernels.ADD, kernels.TAKE_OFF

    def __init__(
        self,
        codecs: Sequence[Codec],
        spans: Sequence[slice],
        like: torch.Tensor,
        places: Sequence[int],
    ) -> None:
        self._loops: Any = codecs[0]._loops
        pairs = zip(codecs, spans, strict=True)
        self.layout = Layout([_span_of(codec, own) for codec, own in pairs], like, places)
        self._tables = self.layout.tasks, self.layout.elements
        self._grid = (len(self.layout.elements),)

    @staticmethod
    def takes(codec: Codec, n: int, once: bool = True) -> bool:
        """Return whether there are codes of ``n`` elements, or with ``once=False`` of several runs
        for which one generator draws."""
        own: Any = codec._loops
        if type(own) not in _LOOPS or not 0 < n < _MOST or codec.takes_non_finite:
            return False
        if own.draws and not is_compiled():  # which say where random numbers begin
            return False
        return once or not _draws_zeros(own)

    def encode(
        self, x: torch.Tensor, randoms: Sequence[np.random.Generator | None], codes: torch.Tensor
    ) -> torch.Tensor:
        """Write the codes of ``x``, given the generator of each run.  Return notes (int32) of each
        run: whether it, and what is left of it, is not finite; :meth:`look` notes the latter."""
        loops = self._loops
        draws = self._drawn(randoms) if loops.draws or _draws_zeros(loops) else None
        with torch.cuda.device_of(x):
            notes = self._notes(x)
            _ENCODE[type(loops)](self, x, codes, notes, draws)
        return notes

    def read(
        self, codes: torch.Tensor, out: torch.Tensor, how: Any = WRITE, ranks: int = 1
    ) -> None:
        """Write what codes decode to where the elements of their runs are in ``out``, or add it, or
        take it off: ``how``.  Codes may be those of several ranks end to end, which are added one
        after the other."""
        loops, heads = self._loops, codes.view(torch.float32)
        own: Any = loops.digits if isinstance(loops, Ternary) else loops
        table: Any = None
        powers, zero, unit, form = heads, 0, 1.0, {"bits": 1, "each": 0, "base": 2}
        if isinstance(own, Digits):
            kind, table, zero, unit = kernels.DIGITS, own.table, own.zero, float(own.unit)
            bits, each = field_of(own.base), digits_of_a_word(own.base)
            powers = _powers(own.base, each, out.device)
            form = {"bits": bits or 0, "each": 0 if bits else each, "base": own.base}
        elif isinstance(own, Signs):
            kind = kernels.LEVELS
            table = None if isinstance(own.scale, str) else [own.scale]
        else:
            kind = kernels.PAIRS if isinstance(own, Halves) else kernels.POWERS
        with torch.cuda.device_of(out):
            kernels.decode[self._grid](
                *(codes, heads, heads if table is None else _constant(table, out.device), powers),
                *(out, *self._tables, ranks, codes.numel() // ranks, zero, unit),
                kind=kind,
                **form,
                listed=table is not None,
                how=how,
                width=WIDTH,
                **EXACT,
            )

    def look(
        self, x: torch.Tensor, what: Any = INFINITE, notes: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Note which runs of ``x`` are not finite, among ``what`` is known of them already."""
        notes = self._notes(x) if notes is None else notes
        with torch.cuda.device_of(x):
            kernels.look[self._grid](x, notes, *self._tables, what=what, width=WIDTH)
        return notes

    def _notes(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(NOTES.value * len(self.layout), dtype=torch.int32, device=x.device)

    def _drawn(self, randoms: Sequence[np.random.Generator | None]) -> torch.Tensor:
        """Return the place in its stream of each run; runs that share a generator are one after the
        other."""
        find: Any = words_of if _draws_zeros(self._loops) else place_of
        rows, places, drawn = [], {}, {}
        for random, n in zip(randoms, self.layout.sizes, strict=True):
            number = id(random)
            if number not in places:
                places[number], drawn[number] = find(random), 0
            key, counter, first = places[number]
            rows.append((*key, *counter, first + drawn[number]))
            drawn[number] += n
        return from_numpy(np.array(rows, np.uint64).view(np.int64), self.layout.tasks)

    def _put_signs(
        self,
        x: torch.Tensor,
        codes: torch.Tensor,
        notes: torch.Tensor,
        sign: Any,
        big: bool = False,
        last: bool = False,
    ) -> None:
        kernels.signs[self._grid](
            *(x, codes, notes, *self._tables), sign=sign, big=big, last=last, width=WIDTH
        )

    def _quantise(
        self,
        own: Any,
        x: torch.Tensor,
        codes: torch.Tensor,
        notes: torch.Tensor,
        draws: torch.Tensor | None,
        limits: torch.Tensor | None = None,
    ) -> None:
        """Write a digit for each element, by the scales that are in front already; or with
        ``Natural`` an exponent."""
        layout, heads = self.layout, codes.view(torch.float32)
        kind, most, grid, form = kernels.NATURAL, 0, heads, (0, 0)
        bits: int | None = 8
        if isinstance(own, Digits):
            kind, most, form = _KINDS[own.kind], _most(own), (own.mantissa, own.bias)
            bits, each = field_of(own.base), digits_of_a_word(own.base)
            grid = _constant(own.grid, x.device) if own.grid else heads
        digits = codes if bits == 8 else torch.empty(x.numel(), dtype=torch.uint8, device=x.device)
        kernels.quantise[self._grid](
            *(x, heads, heads if limits is None else limits, grid, x if draws is None else draws),
            *(digits, notes, *self._tables, most),
            kind=kind,
            is_drawn=draws is not None,
            clipped=limits is not None,
            place=CODE if bits == 8 else START,
            mantissa=form[0],
            bias=form[1],
            width=WIDTH,
            **EXACT,
        )
        if bits is None:
            kernels.pack_words[(len(layout.words),)](
                digits, codes, layout.tasks, layout.words, base=own.base, each=each, width=WIDTH
            )
        elif bits < 8:
            kernels.pack_fields[(len(layout.packed),)](
                digits, codes, layout.tasks, layout.packed, bits=bits, width=WIDTH
            )

    def _encode_digits(
        self, x: torch.Tensor, codes: torch.Tensor, notes: torch.Tensor, draws: torch.Tensor | None
    ) -> None:
        loops, layout, heads = self._loops, self.layout, codes.view(torch.float32)
        own, clip = loops, None
        if isinstance(loops, Ternary):
            own, clip = loops.digits, loops.codec.clip
        limits = None if clip is None else limits_of(x, layout, clip)
        if own.l2:
            of_sums(sums(x, layout, terms.SQUARE), layout, heads, terms.ROOT)
        else:
            scales(x, layout, heads, _KINDS[own.kind], _most(own), limits)
        self._quantise(own, x, codes, notes, draws, limits)

    def _encode_natural(
        self, x: torch.Tensor, codes: torch.Tensor, notes: torch.Tensor, draws: torch.Tensor | None
    ) -> None:
        self._quantise(self._loops, x, codes, notes, draws)
        self._put_signs(x, codes, notes, kernels.NEGATIVE, last=True)

    def _encode_signs(
        self, x: torch.Tensor, codes: torch.Tensor, notes: torch.Tensor, draws: torch.Tensor | None
    ) -> None:
        if draws is not None:
            self._put_signs(x, codes, notes, kernels.POSITIVE)
            counts = torch.empty(*self._grid, dtype=torch.int32, device=x.device)
            kernels.count_zeros[self._grid](x, counts, *self._tables, width=WIDTH)
            kernels.draw_zeros[self._grid](
                *(x, counts.cumsum(0), draws, codes, *self._tables), width=WIDTH
            )
            return
        if isinstance(scale := self._loops.scale, str):
            term, kind = terms.SQUARE, terms.MEAN_ROOT
            if scale == "l1":
                term, kind = terms.MAGNITUDE, terms.MEAN
            found = sums(x, self.layout, term)
            of_sums(found, self.layout, codes.view(torch.float32), kind)
        self._put_signs(x, codes, notes, kernels.NOT_NEGATIVE)

    def _encode_halves(
        self, x: torch.Tensor, codes: torch.Tensor, notes: torch.Tensor, draws: torch.Tensor | None
    ) -> None:
        pairs_of_means(x, self.layout, codes.view(torch.float32))
        self._put_signs(x, codes, notes, kernels.NOT_NEGATIVE, big=True)


_ENCODE: dict[type, Any] = {
    Digits: Codes._encode_digits,
    Ternary: Codes._encode_digits,
    Natural: Codes._encode_natural,
    Signs: Codes._encode_signs,
    Halves: Codes._encode_halves,
}


def _span_of(codec: Codec, own: slice) -> Span:
    """Return the task of some elements."""
    loops: Any = codec._loops
    n = own.stop - own.start
    length = getattr(loops, "length", None) or n
    heads = {Halves: 2, Natural: 0}.get(type(loops), 1)
    if isinstance(loops, Signs) and not isinstance(loops.scale, str):
        heads = 0
    behind = codec.size(n, _FLOAT32) - 4 * heads * triton.cdiv(n, length)
    return Span(own.start, own.stop, length, heads, behind)


def _draws_zeros(own: Any) -> bool:
    return isinstance(own, Signs) and own.draws_zeros


def _most(loops: Digits) -> int:
    """The number of levels of each sign, or the largest number of a format."""
    return int(loops.limit) if loops.kind == "float8" else loops.levels


def _constant(numbers: ArrayLike, device: torch.device) -> torch.Tensor:
    return _kept(np.asarray(numbers, np.float32).tobytes(), device)


@functools.cache
def _kept(numbers: bytes, device: torch.device) -> torch.Tensor:
    return torch.tensor(np.frombuffer(numbers, np.float32).tolist(), device=device)


@functools.cache
def _powers(base: int, each: int, device: torch.device) -> torch.Tensor:
    """The worth of the places of a word, from the lowest."""
    return torch.tensor([base**i for i in range(each)], dtype=torch.int64, device=device)
