"""Frames of elements, sparse or dense: see docs/wire-format.md for their layout.

Indices are ascending.  They are int32 unless the tensor has more than 2**31 elements.  If the
sender was asked to and it is shorter, they are packed: as codes of the gaps between them.

Rice codes (Golomb, 1966; Rice and Plaunt, 1971) come within 0.1 bit of the entropy of indices that
are spread at random.  Elias codes (1975) take a single bit for a gap of zero, and are shorter where
indices stand together.  The shortest is taken.  The layouts of all three, and what was measured,
stand in docs/wire-format.md#packed-indices.  Gap i is the number of places between index i - 1 and
index i, and "index -1" is -1.

A receiver checks everything before a byte of it is used as an index.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from hvd_compress.backends.halves import from_bfloat16, to_bfloat16
from hvd_compress.config import check_choice
from hvd_compress.errors import ConfigError
from hvd_compress.kernels import loops
from hvd_compress.wire.header import (
    START,
    Header,
    Kind,
    failing,
    header_in,
    length_tag,
    opened,
    padded,
    seal,
)

#: what senders can be asked for; "int32" is int64 where indices need that
CODECS = ("int32", "packed")
#: dtypes that values can have
DTYPES = ("float16", "float32", "float64")
VALUES = {"float32": 1, "float16": 2, "float64": 3, "bfloat16": 4}
_INDICES = {"none": 0, "int32": 1, "int64": 2, "packed": 3}


_CAUSES = (
    "the ranks do not run the same version with the same compression options, or a gradient is "
    "sparse on some ranks and dense on others (sparse_as_dense=True)"
)


@functools.cache  # NumPy makes a name anew each time, which takes longer than to look one up
def _name_of(dtype: np.dtype) -> str:
    return dtype.name


def index_dtype(n: int) -> str:
    """Return the narrowest dtype of indices into ``n`` elements, "int32" or "int64"."""
    return "int32" if n <= 2**31 else "int64"


def sparse_size(count: int, n: int, values: str) -> int:
    """Return the bytes of a frame of ``count`` entries of ``n`` elements, indices not packed.  With
    packed indices a frame is never larger."""
    return padded(count * (np.dtype(values).itemsize + np.dtype(index_dtype(n)).itemsize))


def dense_is_shorter(count: int, n: int, values: str, codec: str = "int32") -> bool:
    """Return whether all ``n`` values take fewer bytes than ``count`` of them with their indices.

    For packed indices, whose size depends on where they are, an upper bound of it is taken.
    """
    item = np.dtype(values).itemsize
    index = float(np.dtype(index_dtype(n)).itemsize)
    if codec == "packed" and count:
        index = min(index, (math.log2(n / count) + 2) / 8)
    return count * (item + index) > n * item


def encode_sparse(
    indices: np.ndarray,
    values: np.ndarray,
    n: int,
    codec: str = "int32",
    whole: int | None = None,
) -> np.ndarray:
    """Return a frame (1-D, uint8) of ascending ``indices`` into ``n`` elements and their ``values``
    (float16, float32 or float64).  ``codec="packed"``: about log2(n / count) + 1.5 bits an index,
    and never more bytes than without.  ``whole``: elements of the vector that these ``n`` are a
    region of; receivers must expect the same."""
    return SparseFrames(indices.size, n, _name_of(values.dtype), codec, whole).encode(
        indices, values
    )


class SparseFrames:
    """Frames of ``count`` entries from a sender whose frames are all alike: headers and sizes are
    found out once."""

    def __init__(
        self, count: int, n: int, values: str, codec: str = "int32", whole: int | None = None
    ) -> None:
        check_choice("codec", codec, CODECS)
        self._count, self._n, self._values, self._whole = count, n, values, whole or n
        self._packs, self._dtype = codec == "packed", index_dtype(n)
        self._stored, self._index = _stored(values), np.dtype(self._dtype).newbyteorder("<")
        self._size, self._of_values = sparse_size(count, n, values), count * self._stored.itemsize
        fields = Kind.SPARSE, VALUES[values]
        forms = (self._dtype, "packed")
        self._plain, self._packed = (
            Header(*fields, _INDICES[form], length_tag(self._whole), count).packed()
            for form in forms
        )

    def encode(self, indices: np.ndarray, values: np.ndarray) -> np.ndarray:
        """See :func:`encode_sparse`."""
        if self._packs:
            gaps = gaps_of(indices, self._dtype)
            if self._count and gaps.min() < 0:
                raise ConfigError(f"indices must be ascending; got {indices!r}")
            found = best_parameter(gaps, self._n)
            if found and (size := padded(found[1] + self._of_values)) < self._size:
                frame = np.zeros(size, np.uint8)
                pack(gaps, found[0], frame[START:])
                frame[size - self._of_values :].view(self._stored)[:] = values
                return seal(frame, self._packed)
        frame = np.zeros(self._size, np.uint8)
        end = START + self._count * self._index.itemsize
        frame[START:end].view(self._index)[:] = indices
        frame[end : end + self._of_values].view(self._stored)[:] = values
        return seal(frame, self._plain)

    def decode(self, frame: np.ndarray, sender: str) -> tuple[np.ndarray, np.ndarray]:
        """See :func:`decode_sparse`."""
        header = header_in(frame)
        is_plain = header == self._plain and frame.size == self._size
        start = frame.size - self._of_values
        if is_plain:
            start = START + self._count * self._index.itemsize
        is_short = start >= START and frame.size % 8 == 0 and frame.size < self._size
        if not is_plain and not (header == self._packed and is_short):  # this says what is wrong
            own = self._n, self._values, self._count
            return decode_sparse(frame, *own, sender=sender, whole=self._whole)
        code, decoded = frame[START:start], frame[start : start + self._of_values]
        try:
            indices = (
                plain_indices(code, self._n) if is_plain else unpack(code, self._count, self._n)
            )
        except ValueError as error:
            raise failing(sender, _CAUSES)(str(error)) from None
        return indices, decoded.view(self._stored)


def encode_dense(
    values: np.ndarray, dtype: str | None = None, *, whole: int | None = None
) -> np.ndarray:
    """Return a frame (1-D, uint8) of all ``values`` of a flat array, in their own ``dtype`` or
    another one, which may be "bfloat16"."""
    name = dtype or _name_of(values.dtype)
    if name == "bfloat16":
        values = to_bfloat16(values.astype(np.float32, copy=False))
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            values = values.astype(name, copy=False)
    frame = np.zeros(padded(values.nbytes), np.uint8)
    frame[START : START + values.nbytes].view(values.dtype.newbyteorder("<"))[:] = values
    tag = length_tag(whole or values.size)
    return Header(Kind.DENSE, VALUES[name], _INDICES["none"], tag, values.size).seal(frame)


def _stored(values: str) -> np.dtype:
    """Return the dtype that values have in a frame."""
    return np.dtype("uint16" if values == "bfloat16" else values).newbyteorder("<")


def decode_sparse(
    frame: np.ndarray,
    n: int,
    values: str,
    count: int | None = None,
    *,
    sender: str = "a rank",
    whole: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return ``(indices, values)`` of a frame, views into it where that is possible.

    Args:
        frame: what ``sender`` sent, 1-D uint8.
        n: number of elements of the tensor.
        values: the dtype that the values must have.
        count: the number of entries that there must be; ``None`` if only the sender knows.
        whole: elements of the vector that the tensor is a region of.
    """
    indices, decoded = _decode(
        frame, n, values, count, sender=sender, kinds=(Kind.SPARSE,), whole=whole or n
    )
    assert indices is not None
    return indices, decoded


def decode(
    frame: np.ndarray, n: int, values: str, *, sender: str = "a rank", whole: int | None = None
) -> tuple[np.ndarray | None, np.ndarray]:
    """Return ``(indices, values)`` of a frame that may be dense: then the indices are ``None``, and
    there are ``n`` values.  See :func:`decode_sparse`."""
    kinds = (Kind.SPARSE, Kind.DENSE)
    return _decode(frame, n, values, None, sender=sender, kinds=kinds, whole=whole or n)


def decode_dense(frame: np.ndarray, n: int, values: str, *, sender: str = "a rank") -> np.ndarray:
    """Return the ``n`` values of a dense frame; those of "bfloat16" as float32."""
    if values != "bfloat16":
        return _decode(frame, n, values, n, sender=sender, kinds=(Kind.DENSE,), whole=n)[1]
    words = _decode(frame, n, values, n, sender=sender, kinds=(Kind.DENSE,), whole=n)[1]
    return from_bfloat16(words)


def _decode(
    frame: np.ndarray,
    n: int,
    values: str,
    count: int | None,
    *,
    sender: str,
    kinds: tuple[Kind, ...],
    whole: int,
) -> tuple[np.ndarray | None, np.ndarray]:
    fail = failing(sender, _CAUSES)
    kind, value_code, index_code, length, entries = opened(frame, *kinds, fail=fail)
    plain = index_dtype(n)
    allowed = ("none",) if kind == Kind.DENSE else (plain, "packed")
    if value_code != VALUES[values] or index_code not in [_INDICES[name] for name in allowed]:
        raise fail(f"values or indices of another dtype than {values} and {plain}")
    expected = n if kind == Kind.DENSE else count
    if expected is not None and entries != expected:
        raise fail(f"{entries} entries where {expected} were expected")

    stored = _stored(values)
    item, is_packed = stored.itemsize, index_code == _INDICES["packed"]
    if is_packed:
        start = frame.size - entries * item
        if start < START or frame.size % 8 or frame.size >= sparse_size(entries, n, values):
            raise fail(f"{frame.size} bytes where {entries} packed entries were expected")
    else:
        size = padded(n * item) if kind == Kind.DENSE else sparse_size(entries, n, values)
        if frame.size != size:
            raise fail(f"{frame.size} bytes where {size} were expected")
        start = START if kind == Kind.DENSE else START + entries * np.dtype(plain).itemsize
    if length != length_tag(whole):
        raise fail(f"it belongs to a vector that has not the {whole} elements of this rank's")

    decoded = frame[start : start + entries * item].view(stored)
    if kind == Kind.DENSE:
        return None, decoded
    try:
        code = frame[START:start]
        return (unpack(code, entries, n) if is_packed else plain_indices(code, n)), decoded
    except ValueError as error:
        raise fail(str(error)) from None


def plain_indices(code: np.ndarray, n: int) -> np.ndarray:
    indices = code.view(f"<{np.dtype(index_dtype(n)).str[1:]}")
    if indices.size and (
        indices[0] < 0 or indices[-1] >= n or not (indices[1:] > indices[:-1]).all()
    ):
        raise ValueError(f"indices that are not ascending within 0..{n - 1}")
    return indices


# -- packed indices ---------------------------------------------------------------------------

#: what 64-bit integers allow with room to spare, and no gaps of real tensors need more
_MOST_BITS, _MOST_ELEMENTS = 48, 2**56
#: in the place of b; Elias codes have no parameter
_GAMMA, _DELTA = 64, 65


def gaps_of(indices: np.ndarray, dtype: str) -> np.ndarray:
    """Return the number of places between neighbours of the ascending ``indices``; ``dtype`` holds
    the largest index."""
    gaps = indices.astype(dtype)
    gaps[1:] -= indices[:-1].astype(dtype, copy=False) + 1
    return gaps


def best_parameter(gaps: np.ndarray, n: int) -> tuple[int, int] | None:
    """Return ``(b, bytes)`` of the shortest code of ``gaps`` in a tensor of ``n`` elements, or
    ``None`` if there is no code.  ``b`` is the parameter of a Rice code, or stands for one of
    Elias."""
    count = gaps.size
    if not count or n > _MOST_ELEMENTS:
        return None

    # Right for geometric gaps.  The number of bits is convex in b, so downhill leads to the least.
    mean = int(gaps.sum()) / count
    b = min(int(math.log2(max(1.0, mean * math.log(2)))), _MOST_BITS)
    middle = min(max(b, 1), _MOST_BITS - 1)
    *known, gamma, delta = loops().index_bits(gaps, middle)

    sums = {middle - 1 + i: known[i] for i in range(len(known))}  # of quotients
    best = count * (b + 1) + sums[b]
    for step in (1, -1):
        while 0 <= b + step <= _MOST_BITS:
            if b + step not in sums:
                sums[b + step] = loops().quotients(gaps, b + step)
            if (other := count * (b + step + 1) + sums[b + step]) >= best:
                break
            b, best = b + step, other
    lengths = (gamma - count) // 2  # the sum of L, and of M
    widths = (delta - count - lengths) // 2
    # Each part of a code has bytes of its own, and in front is the parameter.
    size = 1 + (count * b + 7) // 8 + (best - count * b + 7) // 8
    if n <= 2**_MOST_BITS:
        of_gamma = 1 + (count + lengths + 7) // 8 + (lengths + 7) // 8
        of_delta = 1 + (count + widths + 7) // 8 + (widths + 7) // 8 + (lengths + 7) // 8
        size, b = min((size, b), (of_gamma, _GAMMA), (of_delta, _DELTA))
    return b, size


def pack(gaps: np.ndarray, b: int, out: np.ndarray) -> None:
    """Write the code of ``gaps`` to the start of ``out`` (uint8, zeros)."""
    out[0] = b
    if b <= _MOST_BITS:
        loops().rice_pack(gaps, b, out[1:])
    else:
        loops().elias_pack(gaps, b == _DELTA, out[1:])


def unpack(code: np.ndarray, count: int, n: int) -> np.ndarray:
    """Return the ``count`` ascending indices (int64) within 0..n-1.

    Raises:
        ValueError: ``code`` is none of ``count`` such indices, with at most 7 bytes of padding.
    """
    if count and code.size:
        if (b := int(code[0])) <= _MOST_BITS:
            return loops().rice_unpack(code[1:], count, b, n)
        if b in (_GAMMA, _DELTA):
            return loops().elias_unpack(code[1:], count, b == _DELTA, n)
    raise ValueError("packed indices without a valid parameter")
