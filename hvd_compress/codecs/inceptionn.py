"""8, 16 or all bits a value, by its exponent (Li et al., INCEPTIONN, MICRO 2018)."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np

from hvd_compress.codecs.base import Codec
from hvd_compress.config import is_number
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.kernels.bitpacking import full_bytes, pack_fields, unpack_fields

_DROPPED, _EIGHT, _SIXTEEN, _WHOLE = range(4)


@dataclasses.dataclass(frozen=True)
class inceptionn(Codec, name="inceptionn"):
    """The magnitude decides in how many bits a value is sent::

        tag  magnitude            sent
        3    1 or more            the value as it is
        2    middle to 1          16 bits: the sign, and |x| in units of 2^-15
        1    bound to middle      8 bits: the sign, and |x| in units of middle * 2^-7
        0    below bound          nothing; it arrives as zero

    where, with bound = 2^b, middle = 2^(b + ceil(-b / 2)).  Magnitudes are cut to their units and
    never rounded up: no value changes by ``bound`` or more, and what arrives is never larger than
    what was sent.

    Sent: 2 bits of tag an element, four to a byte, the first the lowest; then the whole values, the
    words of 16 bits and the bytes, each in the order of the elements.  How many bytes that is
    depends on the values, so only ``allgather(inceptionn())`` can send them.

    Options:
        bound: a power of two from 2^-14 to 1/2, in units of the gradient.

    Reference: Li et al., MICRO 2018.  Differs from the paper's hardware, as public software has it,
    in: 8 bits count from the middle instead of 1, where values below 1/64 would lose their leading
    bit, and with it their size.

    >>> codec, x = inceptionn(bound=2.0**-4), np.array([1.5, 0.7, 0.1, 0.05])
    >>> code = codec.encode(x, np.random.default_rng(0))
    >>> code.size, codec.decode(code, 4, x.dtype).round(4)
    (12, array([1.5   , 0.7   , 0.0996, 0.    ]))
    """

    bound: float = 2.0**-10

    homogeneous = False
    varies = True

    def __post_init__(self) -> None:
        bound = self.bound
        if not is_number(bound) or bound not in [2.0**b for b in range(-14, 0)]:
            raise ConfigError(f"bound must be a power of two from 2**-14 to 2**-1; got {bound!r}")

    @property
    def _middle(self) -> float:
        b = int(math.log2(self.bound))
        return 2.0 ** (b + math.ceil(-b / 2))

    def size(self, n: int, dtype: np.dtype) -> int:
        raise UnsupportedError(
            f"how many bytes {self!r} takes depends on the values, so it can be sent only alone: "
            "allgather(inceptionn())"
        )

    def encode(self, x: np.ndarray, random: np.random.Generator) -> np.ndarray:
        size = np.abs(x)
        tags = (size >= self.bound).astype(np.uint8) + (size >= self._middle) + (size >= 1)
        signs = np.signbit(x)

        def cut(tag: int, unit: float, bits: int) -> np.ndarray:
            own = tags == tag
            word = (size[own] / x.dtype.type(unit)).astype(f"<u{bits // 8}")
            word |= signs[own].astype(word.dtype) << (bits - 1)
            return word.view(np.uint8)

        whole = x[tags == _WHOLE].astype(x.dtype.newbyteorder("<")).view(np.uint8)
        sixteen, eight = cut(_SIXTEEN, 2.0**-15, 16), cut(_EIGHT, self._middle * 2.0**-7, 8)
        return np.concatenate([pack_fields(tags, 2), whole, sixteen, eight])

    def decode(self, code: np.ndarray, n: int, dtype: np.dtype) -> np.ndarray:
        head = full_bytes(2 * n)
        if code.size < head:
            raise ValueError(f"{code.size} bytes are too few for the tags of {n} values")
        tags = unpack_fields(code[:head], n, 2)
        wide, words, short = (int((tags == tag).sum()) for tag in (_WHOLE, _SIXTEEN, _EIGHT))
        bounds = np.cumsum([head, wide * dtype.itemsize, 2 * words, short])
        if not 0 <= code.size - bounds[-1] < 8:
            raise ValueError(f"{code.size} bytes where tags say {bounds[-1]}, with padding")
        whole, sixteen, eight = (code[a:b] for a, b in itertools.pairwise(bounds))
        values = np.zeros(n, dtype)
        values[tags == _WHOLE] = whole.view(dtype.newbyteorder("<"))

        def restored(word: np.ndarray, unit: float, bits: int) -> np.ndarray:
            size = (word & (2 ** (bits - 1) - 1)).astype(dtype) * dtype.type(unit)
            return np.where(word >> (bits - 1), -size, size)

        values[tags == _SIXTEEN] = restored(sixteen.view("<u2"), 2.0**-15, 16)
        values[tags == _EIGHT] = restored(eight, self._middle * 2.0**-7, 8)
        return values
