"""Small numbers in few bits: fields of b bits, and digits of any base.

Everything works on whole arrays at once, without a loop over elements.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt


def full_bytes(bits: int) -> int:
    """Return the number of bytes that a number of bits takes."""
    return -(-bits // 8)


def _shifts(b: int) -> list[tuple[int, int, int]]:
    """Eight fields of b bits are b bytes: ``(field, byte, s)`` wherever the two overlap, the byte
    being ``field >> s`` there, or ``field << -s``."""
    return [
        (field, byte, 8 * byte - field * b)
        for field in range(8)
        for byte in range(field * b // 8, full_bytes((field + 1) * b))
    ]


def _field_dtype(b: int) -> np.dtype:
    # What a shift to the left pushes out was to be cut off anyway.
    return np.dtype(f"u{next(size for size in (1, 2, 4, 8) if b <= 8 * size)}")


def pack_fields(values: np.ndarray, b: int) -> np.ndarray:
    """Return the bytes (uint8) of ``values`` below 2**b, b bits each, the first bit the lowest."""
    groups = -(-values.size // 8)
    fields = np.zeros((groups, 8), _field_dtype(b))
    fields.reshape(-1)[: values.size] = values
    fields = np.ascontiguousarray(fields.T)
    packed = np.zeros((b, groups), np.uint8)
    for field, byte, s in _shifts(b):
        part = fields[field] >> s if s >= 0 else fields[field] << -s
        packed[byte] |= part.astype(np.uint8)  # the lowest 8 bits
    return packed.T.reshape(-1)[: full_bytes(values.size * b)]


def unpack_fields(packed: np.ndarray, count: int, b: int) -> np.ndarray:
    """Undo :func:`pack_fields`, in the narrowest unsigned type."""
    groups = -(-count // 8)
    padded = np.zeros(groups * b, np.uint8)
    padded[: packed.size] = packed
    in_bytes = np.ascontiguousarray(padded.reshape(groups, b).T).astype(_field_dtype(b))
    fields = np.zeros((8, groups), in_bytes.dtype)
    for field, byte, s in _shifts(b):
        fields[field] |= in_bytes[byte] << s if s >= 0 else in_bytes[byte] >> -s
    fields &= (1 << b) - 1
    return fields.T.reshape(-1)[:count]


def digits_size(count: int, base: int) -> int:
    """Return the bytes of ``count`` digits to ``base``."""
    if bits := field_of(base):
        return full_bytes(count * bits)
    whole, rest = divmod(count, digits_of_a_word(base))
    return 8 * whole + full_bytes((base**rest - 1).bit_length())


def pack_digits(digits: np.ndarray, base: int) -> np.ndarray:
    """Return the bytes (uint8) of ``digits`` (unsigned, 0 .. base - 1), about log2(base) bits each.

    As many digits as fit are put into a word of 64 bits, the first one the highest, and the last
    word is cut.  If a field of bits for each digit takes no more, it has that: for bases such as
    15, 16, 31 and 255.
    """
    if bits := field_of(base):
        return pack_fields(digits, bits)
    each = digits_of_a_word(base)
    whole, rest = divmod(digits.size, each)
    table = np.zeros((whole + 1, each), digits.dtype)
    table[:whole] = digits[: whole * each].reshape(whole, each)
    table[whole, each - rest :] = digits[whole * each :]
    packed = _words(table, base).astype("<u8").view(np.uint8)
    return packed[: digits_size(digits.size, base)]


def unpack_digits(packed: np.ndarray, count: int, base: int) -> np.ndarray:
    """Undo :func:`pack_digits`, in the narrowest unsigned type."""
    if bits := field_of(base):
        return np.minimum(unpack_fields(packed, count, bits), base - 1)  # others are damage
    each = digits_of_a_word(base)
    whole, rest = divmod(count, each)
    padded = np.zeros(8 * (whole + 1), np.uint8)
    padded[: packed.size] = packed
    words: npt.NDArray[np.uint64] = padded.view("<u8").astype(np.uint64)
    table = np.empty((whole + 1, each), np.min_scalar_type(base - 1))
    for i in reversed(range(each)):
        quotient = words // np.uint64(base)
        table[:, i] = words - quotient * np.uint64(base)
        words = quotient
    table[whole, :rest] = table[whole, each - rest :].copy()  # the last word holds no more
    return table.reshape(-1)[:count]


def field_of(base: int) -> int | None:
    """Return the bits of a field for a digit; ``None`` where words are shorter."""
    bits = (base - 1).bit_length()
    return bits if bits * digits_of_a_word(base) <= 64 else None


def digits_of_a_word(base: int) -> int:
    """Return how many digits fit into 64 bits."""
    # Exact: base**n <= 2**64, where a floating-point logarithm might be off by one.
    n = int(64 / math.log2(base)) + 1
    return n if base**n <= 2**64 else n - 1


def _words(table: np.ndarray, base: int) -> np.ndarray:
    words = np.zeros(table.shape[0], np.uint64)
    for column in np.ascontiguousarray(table.T):
        words *= np.uint64(base)
        words += column
    return words
