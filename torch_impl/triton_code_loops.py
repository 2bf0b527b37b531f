"""What the loops of :mod:`hvd_compress.kernels.codecs` do, for tensors in a GPU's memory: each
kind's way from numbers to a code (uint8), and back.

Random numbers are those of the counter-based generator, which each program computes from its place
in the stream.  The host waits for nothing.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from numpy.typing import ArrayLike

from hvd_compress.codecs.ternary import Ternary
from hvd_compress.kernels.bitpacking import digits_of_a_word, field_of
from hvd_compress.kernels.codecs import Digits, Halves, Natural, Signs, draws_of, words_of

from . import triton_codec_kernels as kernels
from . import triton_sum_kernels as terms
from .backend import from_numpy
from .triton_philox import ARRAY, NOWHERE, STREAM
from .triton_sums import EXACT, WIDTH, grid, largest, limit_of, of_sums, sums

_KINDS = {
    "linear": kernels.LINEAR,
    "uniform": kernels.UNIFORM,
    "exponential": kernels.EXPONENTIAL,
    "ternary": kernels.TERNARY,
    "float8": kernels.FLOAT8,
}


class Task(NamedTuple):
    """What is encoded; and notes for the host (int32): 1 if an element is not finite, and how many
    zeros were drawn for."""

    x: torch.Tensor
    random: np.random.Generator
    notes: torch.Tensor

    @property
    def n(self) -> int:
        return self.x.numel()


def _encode_digits(
    loops: Digits, task: Task, code: torch.Tensor, clip: float | None = None
) -> None:
    x, n = task.x, task.n
    length = loops.length or n
    split = 4 * triton.cdiv(n, length)
    heads, packed = code[:split].view(torch.float32), code[split:]
    limit = heads if clip is None else limit_of(x, clip)
    if loops.l2:
        of_sums(sums(x, length, terms.SQUARE), heads, terms.ROOT)
    else:
        terms.of_largest[grid(heads.numel())](
            *(largest(x, length), limit, heads, heads.numel(), float(_most(loops))),
            kind=_KINDS[loops.kind],
            clipped=clip is not None,
            width=WIDTH,
        )
    bits, each = field_of(loops.base), digits_of_a_word(loops.base)
    digits = packed if bits == 8 else torch.empty(n, dtype=torch.uint8, device=x.device)
    is_random = loops.kind not in ("linear", "float8")
    source, draws, skew = _draws(task) if is_random else (NOWHERE, x, 0)
    kernels.quantise[grid(n + skew)](
        *(x, heads, limit, _constant(loops.grid, x.device) if loops.grid else x),
        *(draws, digits, task.notes, n, length, _most(loops)),
        kind=_KINDS[loops.kind],
        source=source,
        clipped=clip is not None,
        mantissa=loops.mantissa,
        bias=loops.bias,
        width=WIDTH,
        **EXACT,
    )
    if bits is None:
        kernels.pack_words[grid(triton.cdiv(n, each))](
            digits, packed, n, packed.numel(), base=loops.base, each=each, width=WIDTH
        )
    elif bits < 8:
        kernels.pack_fields[grid(packed.numel())](
            digits, packed, n, packed.numel(), bits=bits, width=WIDTH
        )


def _decode_digits(loops: Digits, code: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    n, base = out.numel(), loops.base
    length = loops.length or n
    split = 4 * triton.cdiv(n, length)
    bits, each = field_of(base), digits_of_a_word(base)
    table = out if loops.table is None else _constant(loops.table, out.device)
    kernels.from_digits[grid(n)](
        *(code[split:], code[:split].view(torch.float32), table),
        *(_powers(base, each, out.device), out),
        *(n, code.numel() - split, length, loops.zero, float(loops.unit)),
        base=base,
        bits=bits or 0,
        each=0 if bits else each,
        listed=loops.table is not None,
        add=add,
        width=WIDTH,
        **EXACT,
    )


def _encode_ternary(loops: Ternary, task: Task, code: torch.Tensor) -> None:
    _encode_digits(loops.digits, task, code, loops.codec.clip)


def _decode_ternary(loops: Ternary, code: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    _decode_digits(loops.digits, code, out, add)


def _encode_natural(loops: Natural, task: Task, code: torch.Tensor) -> None:
    n = task.n
    source, draws, skew = (NOWHERE, task.x, 0) if loops.biased else _draws(task)
    kernels.exponents[grid(n + skew)](
        task.x, draws, code, task.notes, n, source=source, width=WIDTH, **EXACT
    )
    _put_signs(task, code[n:], kernels.NEGATIVE)


def _decode_natural(loops: Natural, code: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    n = out.numel()
    kernels.from_natural[grid(n)](code, code[n:], out, n, add=add, width=WIDTH)


def _encode_signs(loops: Signs, task: Task, code: torch.Tensor) -> None:
    x, n = task.x, task.n
    if loops.draws_zeros:
        _put_signs(task, code, kernels.POSITIVE)
        counts = torch.empty(*grid(n), dtype=torch.int32, device=x.device)
        kernels.count_zeros[grid(n)](x, counts, n, width=WIDTH)
        draws = _place(words_of(task.random), x)
        kernels.draw_zeros[grid(n)](
            x, counts.cumsum(0), draws, code, task.notes[1:], n, width=WIDTH
        )
        return
    if isinstance(loops.scale, str):
        is_mean = loops.scale == "l1"
        term, kind = (terms.MAGNITUDE, terms.MEAN) if is_mean else (terms.SQUARE, terms.MEAN_ROOT)
        of_sums(sums(x, n, term), code[:4].view(torch.float32), kind, n)
        code = code[4:]
    _put_signs(task, code, kernels.NOT_NEGATIVE)


def _decode_signs(loops: Signs, code: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    if isinstance(loops.scale, str):
        level, code = code[:4].view(torch.float32), code[4:]
    else:
        level = _constant([loops.scale], out.device)
    _from_bits(code, level, out, add)


def _encode_halves(loops: Halves, task: Task, code: torch.Tensor) -> None:
    x, n = task.x, task.n
    length = loops.length or n
    runs = triton.cdiv(n, length)
    terms.two_means[grid(runs)](
        *(sums(x, length, term) for term in (terms.LOW, terms.HIGH, terms.MANY)),
        *(code[: 8 * runs].view(torch.float32), runs, length, n),
        width=WIDTH,
    )
    _put_signs(task, code[8 * runs :], kernels.NOT_NEGATIVE, big=True)


def _decode_halves(loops: Halves, code: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    length = loops.length or out.numel()
    split = 8 * triton.cdiv(out.numel(), length)
    _from_bits(code[split:], code[:split].view(torch.float32), out, add, length)


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


def _put_signs(task: Task, out: torch.Tensor, sign: Any, big: bool = False) -> None:
    kernels.signs[grid(task.n)](task.x, out, task.notes, task.n, sign=sign, big=big, width=WIDTH)


def _from_bits(
    code: torch.Tensor, levels: torch.Tensor, out: torch.Tensor, add: bool, length: int = 0
) -> None:
    """Columns of ``length`` have two levels each, and the first bit of a byte is its highest; with
    0 there is one level, and its negative."""
    kernels.from_bits[grid(out.numel())](
        *(code, levels, out, out.numel(), length),
        paired=length > 0,
        big=length > 0,
        add=add,
        width=WIDTH,
    )


def _draws(task: Task) -> tuple[Any, torch.Tensor, int]:
    """Where a random number for each element comes from, and how many of the stream are skipped."""
    drawn = draws_of(task.random, task.n)
    if isinstance(drawn, np.ndarray):
        return ARRAY, from_numpy(drawn, task.x), 0
    return STREAM, _place(drawn, task.x), drawn[2] % 8


def _place(place: tuple[list[int], list[int], int], like: torch.Tensor) -> torch.Tensor:
    key, counter, first = place
    return from_numpy(np.array([*key, *counter, first], np.uint64).view(np.int64), like)


def _constant(numbers: ArrayLike, device: torch.device) -> torch.Tensor:
    return _kept(np.asarray(numbers, np.float32).tobytes(), device)


@functools.cache
def _kept(numbers: bytes, device: torch.device) -> torch.Tensor:
    return torch.tensor(np.frombuffer(numbers, np.float32).tolist(), device=device)


@functools.cache
def _powers(base: int, each: int, device: torch.device) -> torch.Tensor:
    """What the places of a word are worth, from the lowest."""
    return torch.tensor([base**i for i in range(each)], dtype=torch.int64, device=device)
