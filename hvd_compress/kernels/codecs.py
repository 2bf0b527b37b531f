"""The loops of codecs, compiled: numbers to bytes and back, in one pass.

Their definitions are the codecs' own, in NumPy, which also serve where nothing is compiled:
:class:`hvd_compress.codecs.base.Codec` chooses.  Arrays are flat, contiguous, float32 or
float64; results are the same for any number of threads.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from typing import Any, ClassVar

import numpy as np

from hvd_compress.kernels import is_compiled, native, reference, threads

_KINDS = ("linear", "uniform", "exponential", "ternary", "float8")
_TERMS = ("plain", "magnitude", "square", "zeros")
_SCALES = {"l1": "magnitude", "l2": "square"}
#: fewer random numbers are drawn sooner by NumPy
_FEW = 1024


class Loops(abc.ABC):
    """The compiled loops of a codec."""

    #: random numbers are taken, one per element
    draws: ClassVar[bool] = False
    #: ``encode`` is all in the compiled module, and so there is ``feed``
    feeds: ClassVar[bool] = True

    @property
    @abc.abstractmethod
    def _code(self) -> Any:
        """The code as the compiled module knows it."""

    def encode(self, x: np.ndarray, random: np.random.Generator, out: np.ndarray) -> None:
        """Write the code of ``x`` to ``out`` (uint8)."""
        native.codecs.encode(self._code, x, self.drawn(random, x.size), out, threads())

    def decode(self, code: np.ndarray, out: np.ndarray, add: bool, sign: int = 1) -> None:
        """Write the values of a code, times a ``sign`` (1 or -1), to ``out``, or add them."""
        native.codecs.decode(self._code, code, sign, add, out, threads())

    @functools.cached_property
    def bound_feed(self) -> Any:
        """See :meth:`hvd_compress.codecs.base.Codec.feed`; instead of the generator it takes the
        result of :meth:`drawn`."""
        return functools.partial(native.codecs.feed, self._code)

    @functools.cached_property
    def bound_mean(self) -> Any:
        """See :meth:`hvd_compress.codecs.base.Codec.mean`."""
        return functools.partial(native.codecs.mean, self._code)

    def __getstate__(self) -> dict[str, Any]:
        made = ("_code", "bound_feed", "bound_mean")
        return {key: x for key, x in self.__dict__.items() if key not in made}

    def drawn(self, random: np.random.Generator | None, n: int) -> Any:
        """Return what compiled loops want to know of random numbers for ``n`` elements."""
        return draws_of(random, n) if self.draws and random is not None else None


@dataclasses.dataclass(frozen=True, eq=False)
class Digits(Loops):
    """A scale for each run of elements, then a digit for each element.

    Args:
        kind: how elements are rounded: as in the codecs ``linear``, ``uniform_dithering``,
            ``exponential_dithering``, ``ternary`` or ``float8``, by the first word of their names.
        base: digits are 0 .. ``base`` - 1; the compiled loops take bases up to 256.
        levels: of each sign.
        length: of a run; ``None``: all elements.
        l2: scales are l2 norms rather than the largest magnitudes.
        limit: of magnitudes.
        mantissa, bias: of eight-bit floats.
        grid: zero and the levels, where they are not evenly spaced.
        table: what digits stand for, in units of the scale / ``unit``; ``None``: the digit less
            ``zero``.
    """

    kind: str
    base: int
    levels: int = 0
    length: int | None = None
    l2: bool = False
    limit: float = math.inf
    mantissa: int = 0
    bias: int = 0
    grid: tuple[float, ...] = ()
    table: np.ndarray | None = None
    zero: int = 0
    unit: int = 1

    @functools.cached_property
    def _code(self) -> Any:
        rule = native.codecs.Rule(
            _KINDS.index(self.kind),
            self.base,
            self.levels,
            self.length or 0,
            self.l2,
            self.limit,
            self.mantissa,
            self.bias,
            list(self.grid),
        )
        table = [] if self.table is None else self.table.tolist()
        return native.codecs.Digits(rule, table, self.zero, self.unit)

    @property
    def draws(self) -> bool:  # type: ignore[override]
        return self.kind not in ("linear", "float8")


@dataclasses.dataclass(frozen=True)
class Natural(Loops):
    biased: bool

    @functools.cached_property
    def _code(self) -> Any:
        return native.codecs.Natural(self.biased)

    @property
    def draws(self) -> bool:  # type: ignore[override]
        return not self.biased


@dataclasses.dataclass(frozen=True)
class Signs(Loops):
    """A bit per element, which stands for ``scale`` or its negative.

    Args:
        scale: a number; or it is sent in front: "l1", the mean magnitude, or "l2", the root of the
            mean square.
        draws_zeros: of zeros the bit is drawn; else they count as positive.
    """

    scale: str | float
    draws_zeros: bool = False

    @functools.cached_property
    def _code(self) -> Any:
        if isinstance(self.scale, str):
            return native.codecs.Signs(_TERMS.index(_SCALES[self.scale]), 0.0)
        return native.codecs.Signs(-1, self.scale)

    @property
    def feeds(self) -> bool:  # type: ignore[override]
        return not self.draws_zeros

    def encode(self, x: np.ndarray, random: np.random.Generator, out: np.ndarray) -> None:
        if not self.draws_zeros:
            super().encode(x, random, out)
        elif native.codecs.signs(x, out, threads()):
            out |= drawn_zeros(x, random)


@dataclasses.dataclass(frozen=True)
class Halves(Loops):
    """The codec ``column_means`` of columns of ``length``; ``None``: all elements."""

    length: int | None

    @functools.cached_property
    def _code(self) -> Any:
        return native.codecs.Halves(self.length or 0)


def drawn_zeros(x: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return a bit for each element, as bytes: of zeros it is drawn, and others have none."""
    bits = x == 0
    bits[bits] = random.random(np.count_nonzero(bits)) < 0.5
    return np.packbits(bits, bitorder="little")


def as_loops_take(x: np.ndarray) -> np.ndarray:
    """Return ``x`` contiguous, aligned, and in this machine's byte order."""
    return np.require(x, x.dtype.newbyteorder("="), ["C", "A"])


def total(x: np.ndarray, term: str, shift: float = 0.0) -> float:
    """Return a sum over all elements (float64), in the order of
    :func:`hvd_compress.kernels.reference.sums`.

    It is the "plain" sum, that of their "magnitude", or that of the "square" of their differences
    from ``shift``.
    """
    if is_compiled():
        return native.codecs.sum(as_loops_take(x), _TERMS.index(term), shift, threads())
    terms = x.astype(np.float64)
    if term == "magnitude":
        terms = np.abs(terms)
    elif term == "square":
        terms = np.square(terms - shift)
    return float(reference.sums(terms.reshape(1, -1))[0])


def all_finite(x: np.ndarray) -> bool:
    """Return whether no element of ``x`` (float32 or float64) is NaN or Inf."""
    if is_compiled():
        return native.codecs.all_finite(as_loops_take(x), threads())
    return bool(np.isfinite(x).all())


def draw(random: np.random.Generator, out: np.ndarray) -> None:
    """Fill ``out`` (1-D, float32) as ``random.random(out=out, dtype=np.float32)`` does, for
    benchmarks; ``random`` is that of :mod:`hvd_compress.codecs.at_random`."""
    drawn = draws_of(random, out.size)
    if isinstance(drawn, np.ndarray):
        out[:] = drawn
    else:
        native.codecs.uniforms(drawn, out, threads())


def copy(x: np.ndarray, out: np.ndarray) -> None:
    """Read all bytes of one array (1-D, uint8) while all of another are written: the floor, for
    benchmarks."""
    native.codecs.copy(x, out, threads())


def draws_of(random: np.random.Generator, n: int) -> Any:
    """Return what ``random.random(n, np.float32)`` would: the numbers, or the place in the stream
    where they begin, see :func:`place_of`, which is moved on."""
    if n < _FEW or (place := place_of(random)) is None:
        return random.random(n, np.float32)
    move(random, place, n)
    return place


def place_of(random: np.random.Generator) -> tuple[list[int], list[int], int] | None:
    """Return the place in the stream of a generator of :mod:`~hvd_compress.codecs.at_random`
    where the next number of half a word begins.

    It is the key, the counter, and the halves of words that are drawn of its block.  ``None`` for
    another generator, or without compiled loops.
    """
    generator = random.bit_generator
    if not is_compiled() or not isinstance(generator, np.random.Philox):
        return None
    state: dict[str, Any] = dict(generator.state)
    key, counter = (state["state"][name].tolist() for name in ("key", "counter"))
    place, half = state["buffer_pos"], state["has_uint32"]
    if counter[0] >= 2**63 or (half and int(state["buffer"][place - 1]) >> 32 != state["uinteger"]):
        return None
    # A number takes half a word, of which a block has four.
    return key, counter, 2 * place - half


def move(random: np.random.Generator, place: tuple[list[int], list[int], int], n: int) -> None:
    """Move a generator on as if it had drawn a number of halves of words from its place."""
    key, counter, first = place
    words, half = divmod(first + n, 2)
    words += half
    block = (words - 1) // 4
    buffer = np.array(native.codecs.philox(place, block, 1), np.uint64)
    at = words - 4 * block
    generator, counter = random.bit_generator, [counter[0] + block, *counter[1:]]
    moved: dict[str, Any] = {
        **generator.state,
        "state": {"key": np.array(key, np.uint64), "counter": np.array(counter, np.uint64)},
        "buffer": buffer,
        "buffer_pos": at,
        "has_uint32": half,
        "uinteger": int(buffer[at - 1]) >> 32,
    }
    generator.state = moved


def words_of(random: np.random.Generator) -> tuple[list[int], list[int], int]:
    """Return the place from which ``random``, of :mod:`hvd_compress.codecs.at_random`, draws
    its next whole word; see :func:`place_of`."""
    state: dict[str, Any] = dict(random.bit_generator.state)
    key, counter = (state["state"][name].tolist() for name in ("key", "counter"))
    return key, counter, 2 * state["buffer_pos"]
