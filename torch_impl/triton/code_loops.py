"""The loops of :mod:`hvd_compress.kernels.codecs` for tensors in a GPU's memory.

Each kind turns numbers into codes (uint8), and back, of all tasks of a layout at once.  Random
numbers are those of the counter-based generator, which each program computes from its place in the
stream.  The host waits for nothing.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import triton
from numpy.typing import ArrayLike

from hvd_compress.codecs import Codec
from hvd_compress.codecs.ternary import Ternary
from hvd_compress.kernels.bitpacking import digits_of_a_word, field_of
from hvd_compress.kernels.codecs import Digits, Halves, Natural, Signs

from . import codec_kernels as kernels
from . import sum_kernels as terms
from .sums import limits_of, of_sums, pairs_of_means, scales, sums
from .task_kernels import CODE, START
from .tasks import EXACT, WIDTH, Layout, Span

_FLOAT32 = np.dtype(np.float32)
#: so many codes, and the bytes from one to the next
_Apart: TypeAlias = tuple[int, int]
_KINDS = {
    "linear": kernels.LINEAR,
    "uniform": kernels.UNIFORM,
    "exponential": kernels.EXPONENTIAL,
    "ternary": kernels.TERNARY,
    "float8": kernels.FLOAT8,
}


class Tasks(NamedTuple):
    """The inputs of an encoding: elements of ``x``, and the places in their streams of random
    numbers, if any are drawn.  Notes of each task for the host (int32) are zeros."""

    x: torch.Tensor
    layout: Layout
    draws: torch.Tensor | None
    notes: torch.Tensor

    @property
    def blocks(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layout.tasks, self.layout.elements

    @property
    def stream(self) -> tuple[torch.Tensor, bool]:
        return (self.x, False) if self.draws is None else (self.draws, True)


def loops_of(codec: Codec) -> Any:
    """Return the loops of a codec, if there are any here."""
    loops = codec._loops
    return loops if type(loops) in LOOPS else None


def span_of(codec: Codec, own: slice) -> Span:
    """Return the task of some elements."""
    loops, n = loops_of(codec), own.stop - own.start
    length = getattr(loops, "length", None) or n
    heads = {Halves: 2, Natural: 0}.get(type(loops), 1)
    if isinstance(loops, Signs) and not isinstance(loops.scale, str):
        heads = 0
    behind = codec.size(n, _FLOAT32) - 4 * heads * triton.cdiv(n, length)
    return Span(own.start, own.stop, length, heads, behind)


def encode(loops: Any, tasks: Tasks, codes: torch.Tensor) -> None:
    """Write codes, ``layout.nbytes`` of them (uint8)."""
    LOOPS[type(loops)][0](loops, tasks, codes)


def decode(
    loops: Any, layout: Layout, codes: torch.Tensor, out: torch.Tensor, how: Any, ranks: int = 1
) -> None:
    """Write what codes decode to where the elements of their tasks are in ``out``, or add it, or
    take it off: ``how``.  ``codes`` are those of so many ``ranks``, with as many bytes each."""
    apart = ranks, codes.numel() // ranks
    LOOPS[type(loops)][1](loops, layout, codes, out, how, apart)


def look(tasks: Tasks, what: Any) -> None:
    """Note which tasks have an element that is not finite."""
    kernels.look[_programs(tasks.layout.elements)](
        tasks.x, tasks.notes, *tasks.blocks, what=what, width=WIDTH
    )


def _encode_digits(
    loops: Digits, tasks: Tasks, codes: torch.Tensor, clip: float | None = None
) -> None:
    x, layout, _, notes = tasks
    heads = codes.view(torch.float32)
    limits = None if clip is None else limits_of(x, layout, clip)
    if loops.l2:
        of_sums(sums(x, layout, terms.SQUARE), layout, heads, terms.ROOT)
    else:
        scales(x, layout, heads, _KINDS[loops.kind], _most(loops), limits)
    bits, each = field_of(loops.base), digits_of_a_word(loops.base)
    digits = codes if bits == 8 else torch.empty(x.numel(), dtype=torch.uint8, device=x.device)
    stream, is_drawn = tasks.stream
    kernels.quantise[_programs(layout.elements)](
        *(x, heads, heads if limits is None else limits),
        *(_constant(loops.grid, x.device) if loops.grid else heads, stream),
        *(digits, notes, *tasks.blocks, _most(loops)),
        kind=_KINDS[loops.kind],
        is_drawn=is_drawn,
        clipped=clip is not None,
        place=CODE if bits == 8 else START,
        mantissa=loops.mantissa,
        bias=loops.bias,
        width=WIDTH,
        **EXACT,
    )
    if bits is None:
        kernels.pack_words[_programs(layout.words)](
            digits, codes, layout.tasks, layout.words, base=loops.base, each=each, width=WIDTH
        )
    elif bits < 8:
        kernels.pack_fields[_programs(layout.packed)](
            digits, codes, layout.tasks, layout.packed, bits=bits, width=WIDTH
        )


def _decode_digits(
    loops: Digits, layout: Layout, codes: torch.Tensor, out: torch.Tensor, how: Any, apart: _Apart
) -> None:
    base, heads = loops.base, codes.view(torch.float32)
    bits, each = field_of(base), digits_of_a_word(base)
    table = heads if loops.table is None else _constant(loops.table, out.device)
    kernels.from_digits[_programs(layout.elements)](
        *(codes, heads, table, _powers(base, each, out.device), out),
        *(layout.tasks, layout.elements, *apart, loops.zero, float(loops.unit)),
        base=base,
        bits=bits or 0,
        each=0 if bits else each,
        listed=loops.table is not None,
        how=how,
        width=WIDTH,
        **EXACT,
    )


def _encode_ternary(loops: Ternary, tasks: Tasks, codes: torch.Tensor) -> None:
    _encode_digits(loops.digits, tasks, codes, loops.codec.clip)


def _decode_ternary(loops: Ternary, *arguments: Any) -> None:
    _decode_digits(loops.digits, *arguments)


def _encode_natural(loops: Natural, tasks: Tasks, codes: torch.Tensor) -> None:
    stream, is_drawn = tasks.stream
    kernels.exponents[_programs(tasks.layout.elements)](
        *(tasks.x, stream, codes, tasks.notes, *tasks.blocks),
        is_drawn=is_drawn,
        width=WIDTH,
        **EXACT,
    )
    _put_signs(tasks, codes, kernels.NEGATIVE, last=True)


def _decode_natural(
    loops: Natural, layout: Layout, codes: torch.Tensor, out: torch.Tensor, how: Any, apart: _Apart
) -> None:
    kernels.from_natural[_programs(layout.elements)](
        codes, out, layout.tasks, layout.elements, *apart, how=how, width=WIDTH
    )


def _encode_signs(loops: Signs, tasks: Tasks, codes: torch.Tensor) -> None:
    x, layout, draws, notes = tasks
    if draws is not None:
        _put_signs(tasks, codes, kernels.POSITIVE)
        grid, width = _programs(layout.elements), {"width": WIDTH}
        counts = torch.empty(*grid, dtype=torch.int32, device=x.device)
        kernels.count_zeros[grid](x, counts, *tasks.blocks, **width)
        kernels.draw_zeros[grid](x, counts.cumsum(0), draws, codes, notes, *tasks.blocks, **width)
        return
    if isinstance(loops.scale, str):
        is_mean = loops.scale == "l1"
        term, kind = (terms.MAGNITUDE, terms.MEAN) if is_mean else (terms.SQUARE, terms.MEAN_ROOT)
        of_sums(sums(x, layout, term), layout, codes.view(torch.float32), kind)
    _put_signs(tasks, codes, kernels.NOT_NEGATIVE)


def _decode_signs(
    loops: Signs, layout: Layout, codes: torch.Tensor, out: torch.Tensor, how: Any, apart: _Apart
) -> None:
    _from_bits(
        layout, codes, out, how, apart, None if isinstance(loops.scale, str) else loops.scale
    )


def _encode_halves(loops: Halves, tasks: Tasks, codes: torch.Tensor) -> None:
    pairs_of_means(tasks.x, tasks.layout, codes.view(torch.float32))
    _put_signs(tasks, codes, kernels.NOT_NEGATIVE, big=True)


def _decode_halves(
    loops: Halves, layout: Layout, codes: torch.Tensor, out: torch.Tensor, how: Any, apart: _Apart
) -> None:
    _from_bits(layout, codes, out, how, apart, paired=True)


LOOPS: dict[type, tuple[Any, Any]] = {
    Digits: (_encode_digits, _decode_digits),
    Ternary: (_encode_ternary, _decode_ternary),
    Natural: (_encode_natural, _decode_natural),
    Signs: (_encode_signs, _decode_signs),
    Halves: (_encode_halves, _decode_halves),
}


def _most(loops: Digits) -> int:
    """The number of levels of each sign, or the largest number of a format."""
    return int(loops.limit) if loops.kind == "float8" else loops.levels


def _put_signs(
    tasks: Tasks, codes: torch.Tensor, sign: Any, big: bool = False, last: bool = False
) -> None:
    kernels.signs[_programs(tasks.layout.elements)](
        *(tasks.x, codes, tasks.notes, *tasks.blocks), sign=sign, big=big, last=last, width=WIDTH
    )


def _from_bits(
    layout: Layout,
    codes: torch.Tensor,
    out: torch.Tensor,
    how: Any,
    apart: _Apart,
    level: float | None = None,
    paired: bool = False,
) -> None:
    heads = codes.view(torch.float32)
    kernels.from_bits[_programs(layout.elements)](
        *(codes, heads, heads if level is None else _constant([level], out.device), out),
        *(layout.tasks, layout.elements, *apart),
        constant=level is not None,
        paired=paired,
        how=how,
        width=WIDTH,
    )


def _programs(blocks: torch.Tensor) -> tuple[int]:
    return (len(blocks),)


def _constant(numbers: ArrayLike, device: torch.device) -> torch.Tensor:
    return _kept(np.asarray(numbers, np.float32).tobytes(), device)


@functools.cache
def _kept(numbers: bytes, device: torch.device) -> torch.Tensor:
    return torch.tensor(np.frombuffer(numbers, np.float32).tolist(), device=device)


@functools.cache
def _powers(base: int, each: int, device: torch.device) -> torch.Tensor:
    """The worth of the places of a word, from the lowest."""
    return torch.tensor([base**i for i in range(each)], dtype=torch.int64, device=device)
