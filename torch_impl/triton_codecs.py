"""Codecs for tensors in a GPU's memory, in Triton, with the same bits as on the host.

Codes are made where a tensor is, and come to the host in one copy, with a note whether the tensor
was finite: the only thing that the host waits for.  What arrives from other ranks is copied to the
GPU as bytes, and decoded or added there.

Random numbers are those of the counter-based generator, which each program computes from its place
in the stream; l2 norms and means are sums in the order that
:func:`hvd_compress.kernels.reference.sums` defines.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import triton

from hvd_compress.codecs import Codec
from hvd_compress.codecs.compiled import Compiled
from hvd_compress.codecs.ternary import Ternary
from hvd_compress.kernels.bitpacking import digits_of_a_word, field_of
from hvd_compress.kernels.codecs import Digits, Halves, Natural, Signs, draws_of, skip, words_of

from . import triton_codec_kernels as kernels
from .backend import from_numpy

#: elements that a program takes, and blocks of a sum
_WIDTH, _ROWS = 1024, 8
#: places within a tensor and its code are 32-bit integers
_MOST = 2**30
#: products and sums are not contracted, since the bits must be those of NumPy
_EXACT = {"enable_fp_fusion": False}
_KINDS = {
    "linear": kernels.LINEAR,
    "uniform": kernels.UNIFORM,
    "exponential": kernels.EXPONENTIAL,
    "ternary": kernels.TERNARY,
    "float8": kernels.FLOAT8,
}


def placed(codec: Codec, like: torch.Tensor) -> Placed | None:
    """Return the codec for flat tensors on the GPU of ``like``, or ``None`` where only the host has
    loops: for float64, and for the codecs that NumPy serves."""
    if like.dtype != torch.float32 or not 0 < like.numel() < _MOST:
        return None
    loops = codec._loops if isinstance(codec, Compiled) else None
    return Placed(codec, loops, like) if type(loops) in _LOOPS else None


class Placed:
    """``codec`` with its bytes in host memory and its numbers, float32, on the GPU of ``like``; see
    :class:`hvd_compress.codecs.base.Coder`."""

    def __init__(self, codec: Codec, loops: Any, like: torch.Tensor) -> None:
        self._codec, self._loops, self._device = codec, loops, like.device
        self._encode, self._decode = _LOOPS[type(loops)]

    def __repr__(self) -> str:
        return repr(self._codec)  # which is what frames are marked with

    def size(self, n: int, dtype: np.dtype) -> int:
        return self._codec.size(n, dtype)

    def zeros(self, n: int, dtype: np.dtype) -> torch.Tensor:
        return torch.zeros(n, dtype=torch.float32, device=self._device)

    def put(
        self,
        x: torch.Tensor,
        random: np.random.Generator,
        out: np.ndarray,
        sent: torch.Tensor | None = None,
    ) -> bool:
        if not x.numel():  # of which a code may still have a scale
            return self._codec.put(x.cpu().numpy(), random, out)
        state = random.bit_generator.state
        end = out.size + -out.size % 8
        room = torch.empty(end + 8, dtype=torch.uint8, device=x.device)
        code, notes = room[: out.size], room[end:].view(torch.int32)
        notes.zero_()
        with torch.cuda.device_of(x):
            self._encode(self._loops, x, random, code, notes)
            if sent is not None:
                self._decode(self._loops, code, sent, False)
        on_host = torch.empty_like(room, device="cpu", pin_memory=x.is_cuda)
        arrived = on_host.copy_(room).numpy()  # the only thing that the host waits for
        infinite, zeros = arrived[end:].view(np.int32).tolist()
        if infinite:
            random.bit_generator.state = state
            return False
        skip(random, zeros)
        out[:] = arrived[: out.size]
        return True

    def decode_to(self, code: np.ndarray, out: torch.Tensor, add: bool = False) -> None:
        if out.numel():
            with torch.cuda.device_of(out):
                self._decode(self._loops, from_numpy(code, out), out, add)


# Each kind of loops: numbers to a code, with a note of what is not finite and a number of zeros that
# were drawn for; and back.


def _encode_digits(
    loops: Digits,
    x: torch.Tensor,
    random: np.random.Generator,
    code: torch.Tensor,
    notes: torch.Tensor,
    clip: float | None = None,
) -> None:
    length = loops.length or x.numel()
    split = 4 * triton.cdiv(x.numel(), length)
    heads, limit = code[:split].view(torch.float32), None
    if clip is not None:
        limit = _limit(x, clip)
    if loops.l2:
        _of_sums(_sums(x, length, kernels.SQUARE), heads, kernels.ROOT)
    else:
        kernels.of_largest[_grid(heads.numel())](
            *(_largest(x, length), heads if limit is None else limit, heads, heads.numel()),
            float(loops.limit if loops.kind == "float8" else loops.levels),
            kind=_KINDS[loops.kind],
            clipped=limit is not None,
            width=_WIDTH,
        )
    bits, each = field_of(loops.base), digits_of_a_word(loops.base)
    packed = code[split:]
    digits = packed if bits == 8 else torch.empty(x.numel(), dtype=torch.uint8, device=x.device)
    _quantise(loops, x, random, heads, limit, digits, notes)
    if bits == 8:
        return
    form: dict[str, int] = {"bits": bits} if bits else {"base": loops.base, "each": each}
    pack, count = kernels.pack_fields, packed.numel()
    if not bits:
        pack, count = kernels.pack_words, triton.cdiv(x.numel(), each)
    pack[_grid(count)](digits, packed, x.numel(), packed.numel(), **form, width=_WIDTH)


def _quantise(
    loops: Digits | None,
    x: torch.Tensor,
    random: np.random.Generator | None,
    heads: torch.Tensor,
    limit: torch.Tensor | None,
    digits: torch.Tensor,
    notes: torch.Tensor,
) -> None:
    """``loops`` are ``None`` for natural compression, and ``random`` where nothing is drawn."""
    n, source, draws, skew = x.numel(), kernels.NOWHERE, x, 0
    if loops and loops.kind in ("linear", "float8"):
        random = None
    if random is not None:
        drawn = draws_of(random, n)
        if isinstance(drawn, np.ndarray):
            source, draws = kernels.ARRAY, from_numpy(drawn, x)
        else:
            source, draws, skew = kernels.STREAM, _place(drawn, x), drawn[2] % 8
    is_float8 = loops is not None and loops.kind == "float8"
    levels = 0 if loops is None else int(loops.limit) if is_float8 else loops.levels
    grid = _constant(loops.grid, x.device) if loops and loops.grid else x
    kernels.quantise[_grid(n + skew)](
        *(x, heads, heads if limit is None else limit, grid, draws, digits, notes, n),
        *(loops.length or n if loops else n, levels),
        kind=_KINDS[loops.kind] if loops else kernels.NATURAL,
        source=source,
        clipped=limit is not None,
        mantissa=loops.mantissa if loops else 0,
        bias=loops.bias if loops else 0,
        width=_WIDTH,
        **_EXACT,
    )


def _decode_digits(loops: Digits, code: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    n = out.numel()
    length, base = loops.length or n, loops.base
    split = 4 * triton.cdiv(n, length)
    bits, each = field_of(base), digits_of_a_word(base)
    listed = loops.table is not None
    table = _constant(tuple(loops.table.tolist()), out.device) if loops.table is not None else out
    kernels.from_digits[_grid(n)](
        *(code[split:], code[:split].view(torch.float32), table),
        *(code if bits else _powers(base, each, out.device), out),
        *(n, code.numel() - split, length, loops.zero, float(loops.unit)),
        base=base,
        bits=bits or 0,
        each=0 if bits else each,
        listed=listed,
        add=add,
        width=_WIDTH,
        **_EXACT,
    )


def _encode_ternary(
    loops: Ternary,
    x: torch.Tensor,
    random: np.random.Generator,
    code: torch.Tensor,
    notes: torch.Tensor,
) -> None:
    _encode_digits(loops.digits, x, random, code, notes, loops.codec.clip)


def _decode_ternary(loops: Ternary, code: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    _decode_digits(loops.digits, code, out, add)


def _encode_natural(
    loops: Natural,
    x: torch.Tensor,
    random: np.random.Generator,
    code: torch.Tensor,
    notes: torch.Tensor,
) -> None:
    n = x.numel()
    _quantise(None, x, None if loops.biased else random, x, None, code[:n], notes)
    _signs(x, code[n:], notes, kernels.NEGATIVE)


def _decode_natural(loops: Natural, code: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    n = out.numel()
    kernels.from_natural[_grid(n)](code, code[n:], out, n, add=add, width=_WIDTH)


def _encode_signs(
    loops: Signs,
    x: torch.Tensor,
    random: np.random.Generator,
    code: torch.Tensor,
    notes: torch.Tensor,
) -> None:
    n = x.numel()
    if loops.draws_zeros:
        _signs(x, code, notes, kernels.POSITIVE)
        counts = torch.empty(triton.cdiv(n, _WIDTH), dtype=torch.int32, device=x.device)
        kernels.count_zeros[_grid(n)](x, counts, n, width=_WIDTH)
        ends = counts.cumsum(0)
        draws = _place(words_of(random), x)
        kernels.draw_zeros[_grid(n)](x, ends, draws, code, notes[1:], n, width=_WIDTH)
        return
    if isinstance(loops.scale, str):
        term, kind = kernels.MAGNITUDE, kernels.MEAN
        if loops.scale == "l2":
            term, kind = kernels.SQUARE, kernels.MEAN_ROOT
        _of_sums(_sums(x, n, term), code[:4].view(torch.float32), kind, n)
        code = code[4:]
    _signs(x, code, notes, kernels.NOT_NEGATIVE)


def _decode_signs(loops: Signs, code: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    if isinstance(loops.scale, str):
        level, code = code[:4].view(torch.float32), code[4:]
    else:
        level = _constant((loops.scale,), out.device)
    _from_bits(code, level, out, add)


def _encode_halves(
    loops: Halves,
    x: torch.Tensor,
    random: np.random.Generator,
    code: torch.Tensor,
    notes: torch.Tensor,
) -> None:
    n = x.numel()
    length = loops.length or n
    runs = triton.cdiv(n, length)
    kernels.two_means[_grid(runs)](
        *(_sums(x, length, term) for term in (kernels.LOW, kernels.HIGH, kernels.MANY)),
        *(code[: 8 * runs].view(torch.float32), runs, length, n),
        width=_WIDTH,
    )
    _signs(x, code[8 * runs :], notes, kernels.NOT_NEGATIVE, big=True)


def _decode_halves(loops: Halves, code: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    length = loops.length or out.numel()
    split = 8 * triton.cdiv(out.numel(), length)
    _from_bits(code[split:], code[:split].view(torch.float32), out, add, length)


_LOOPS: dict[type, tuple[Any, Any]] = {
    Digits: (_encode_digits, _decode_digits),
    Ternary: (_encode_ternary, _decode_ternary),
    Natural: (_encode_natural, _decode_natural),
    Signs: (_encode_signs, _decode_signs),
    Halves: (_encode_halves, _decode_halves),
}


def _signs(
    x: torch.Tensor, out: torch.Tensor, notes: torch.Tensor, sign: Any, big: bool = False
) -> None:
    n = x.numel()
    kernels.signs[_grid(n)](x, out, notes, n, sign=sign, big=big, width=_WIDTH)


def _from_bits(
    code: torch.Tensor, levels: torch.Tensor, out: torch.Tensor, add: bool, length: int = 0
) -> None:
    """Columns of ``length`` have two levels each, and the first bit of a byte is its highest; with
    0 there is one level, and its negative."""
    kernels.from_bits[_grid(out.numel())](
        *(code, levels, out, out.numel(), length),
        paired=length > 0,
        big=length > 0,
        add=add,
        width=_WIDTH,
    )


def _sums(
    x: torch.Tensor, length: int, term: Any, shift: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sum (float64) of a term of the elements of each run."""
    n = x.numel()
    while True:
        blocks = triton.cdiv(length, kernels.SUMMED.value)
        count = triton.cdiv(n, length) * blocks
        found = torch.empty(count, dtype=torch.float64, device=x.device)
        kernels.sums[(triton.cdiv(count, _ROWS),)](
            *(x, found if shift is None else shift, found, n, length, blocks, count),
            term=term,
            rows=_ROWS,
            **_EXACT,
        )
        if blocks == 1:
            return found
        # The sums of a run are added up in the same way.
        x, n, length, term, shift = found, count, blocks, kernels.PLAIN, None


def _of_sums(
    found: torch.Tensor, out: torch.Tensor, kind: Any, n: int = 1, clip: float = 1.0
) -> None:
    bits = np.float64(clip).view(np.int64).item()
    kernels.of_sums[_grid(out.numel())](
        found, out, out.numel(), n, bits, kind=kind, width=_WIDTH, **_EXACT
    )


def _limit(x: torch.Tensor, clip: float) -> torch.Tensor:
    """So many standard deviations."""
    n = x.numel()
    mean = torch.empty(1, dtype=torch.float64, device=x.device)
    limit = torch.empty(1, dtype=torch.float32, device=x.device)
    _of_sums(_sums(x, n, kernels.PLAIN), mean, kernels.MEAN, n)
    _of_sums(_sums(x, n, kernels.DEVIATION, mean), limit, kernels.LIMIT, n, clip)
    return limit


def _largest(x: torch.Tensor, length: int) -> torch.Tensor:
    """Return the largest magnitude of each run, as an integer."""
    runs, blocks = triton.cdiv(x.numel(), length), triton.cdiv(length, kernels.SUMMED.value)
    found = torch.zeros(runs, dtype=torch.int32, device=x.device)
    kernels.largest[(triton.cdiv(runs * blocks, _ROWS),)](
        x, found, x.numel(), length, blocks, runs * blocks, rows=_ROWS
    )
    return found


def _grid(n: int) -> tuple[int]:
    return (triton.cdiv(n, _WIDTH),)


def _place(place: tuple[list[int], list[int], int], like: torch.Tensor) -> torch.Tensor:
    """Key, counter and what has been drawn, on the GPU."""
    key, counter, first = place
    return from_numpy(np.array([*key, *counter, first], np.uint64).view(np.int64), like)


@functools.cache
def _constant(numbers: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device=device)


@functools.cache
def _powers(base: int, each: int, device: torch.device) -> torch.Tensor:
    """What the places of a word are worth, from the lowest."""
    return torch.tensor([base**i for i in range(each)], dtype=torch.int64, device=device)
