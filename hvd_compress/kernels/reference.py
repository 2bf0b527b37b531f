"""The compiled loops in NumPy: their definition, which also runs where there is no compiler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hvd_compress.kernels.arrays import Column, Momentum, Selected, Steps, momenta_of
from hvd_compress.kernels.bitpacking import full_bytes, pack_fields, unpack_fields

#: elements that are added up in one go
_SUMMED = 4096


class Selection:
    """Finds the elements of largest magnitude in each tensor of a bucket.

    Args:
        sizes: the number of elements of each tensor, below 2**32.
        counts: how many are selected of each, from 1 to its size.
    """

    def __init__(self, sizes: Sequence[int], counts: Sequence[int]) -> None:
        self._counts = list(counts)
        self._offsets = np.cumsum([0, *sizes[:-1]])
        self._move: Any = None  # momenta, whether there are any, and the Nesterov flag

    def select(self, steps: Steps, momentum: Momentum, nesterov: bool) -> Selected:
        """Return the ``count`` largest elements of what the residual of each tensor will be before
        anything is sent, of equal ones the first::

            u = m u + g;    v = v + u           with momentum
            u = m (u + g);  v = v + u + g       with Nesterov's
            v = v + g                           if momentum is None
            v = g                               if there are no residuals either

        ``momentum`` is one number, or one for each tensor.  In a tensor with a NaN or Inf, NaN is
        selected at the first places.

        If old states are kept, new ones are written here, and :meth:`settle` writes no more than
        the selected elements.  The keeper puts the old ones back if the step does not hold."""
        indices, values, finite = [], [], []
        self._move = momenta_of(momentum, len(self._counts)), momentum is not None, nesterov
        keeps = steps.kept_residuals is not None
        places_of = steps.rows(), steps.kept(), self._moved(steps)
        rows = zip(*places_of, self._counts, self._offsets, strict=True)
        for own, kept, (velocity, residual), count, offset in rows:
            if fine := bool(np.isfinite(residual).all()):
                places = np.sort(np.argsort(-np.abs(residual), kind="stable")[:count])
                values.append(residual[places])
            else:
                places = np.arange(count)
                values.append(np.full(count, np.nan, np.float32))
            indices.append(offset + places)
            finite.append(fine)
            if keeps:
                kept[0][:], own[1][:] = own[1], residual
            if keeps and velocity is not None:
                kept[1][:], own[3][:] = own[3], velocity
        return Selected(np.concatenate(indices), np.concatenate(values), np.array(finite))

    def settle(
        self,
        steps: Steps,
        indices: np.ndarray,
        remaining: np.ndarray,
        masking: bool,
        finite: np.ndarray,
    ) -> None:
        """Write the new velocities and residuals of the step of the last :meth:`select`, of tensors
        that are ``finite`` (bool).

        They are the rest of the selected elements, and with ``masking`` zeros in their velocities.
        """
        bounds = np.cumsum(self._counts)[:-1]
        parts = zip(np.split(indices, bounds), np.split(remaining, bounds), finite, strict=True)
        if steps.kept_residuals is None:
            for own, moved, fine in zip(steps.rows(), self._moved(steps), finite, strict=True):
                if fine:
                    velocity, own[2][:] = moved
                if fine and velocity is not None:
                    own[4][:] = velocity
        rows = zip(steps.rows(), self._offsets, parts, strict=True)
        for (_, _, residual, _, velocity), offset, (places, left, fine) in rows:
            if fine:
                residual[places - offset] = left
                if self._move[1] and masking:
                    velocity[places - offset] = 0

    def _moved(self, steps: Steps) -> Iterator[tuple[np.ndarray | None, np.ndarray]]:
        """The new velocity and residual of each tensor, before anything is sent."""
        momenta, has_momentum, nesterov = self._move
        for (gradient, residual, _, velocity, _), m in zip(steps.rows(), momenta, strict=True):
            u, direction = None, gradient
            with np.errstate(over="ignore", invalid="ignore"):
                if has_momentum:
                    u = velocity + gradient if nesterov else velocity
                    u = u * m
                    if not nesterov:
                        u += gradient
                    direction = u + gradient if nesterov else u
                yield u, direction if residual is None else direction + residual


def add_up(
    out: Column,
    indices: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
    size: int,
) -> None:
    """Write the sum of sparse vectors, divided by ``size``, into ``out``.

    Args:
        out: flat arrays, which the vectors span end to end; what is in them is lost.
        indices, values: of each vector, ascending indices (int64) and float32.  They are added in
            this order.
    """
    bounds = np.cumsum(out.sizes)
    total = np.zeros(bounds[-1], np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for own, theirs in zip(indices, values, strict=True):
            total[own] += theirs
        total /= np.float32(size)
    for x, part in zip(out.arrays, np.split(total, bounds[:-1]), strict=True):
        x[:] = part


def merge(
    indices: Sequence[np.ndarray], values: Sequence[np.ndarray], size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum of sparse vectors, divided by ``size``, as ascending indices (int64) and their
    values (float32).

    Args:
        indices, values: of each vector, ascending indices (int64) and float32.  They are added in
            this order.
    """
    places, at = np.unique(np.concatenate(indices), return_inverse=True)
    total = np.zeros(places.size, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        ends = np.cumsum([x.size for x in indices])
        for own, theirs in zip(np.split(at, ends[:-1]), values, strict=True):
            total[own] += theirs
        total /= np.float32(size)
    return places, total


def sums(rows: np.ndarray) -> np.ndarray:
    """Return the sum of each row of a matrix (float64), added in an order that does not depend on
    the machine or on its threads.

    4096 elements make one sum.  It has 16 sums of every sixteenth element each, of which the second
    half is added to the first until one is left.  The sums of more elements are added up in the
    same way.
    """
    count = max(rows.shape[1], 1)
    block = min(_SUMMED, -(-count // 16) * 16)
    filled = np.zeros((rows.shape[0], -(-count // block) * block))
    filled[:, : rows.shape[1]] = rows
    lanes = filled.reshape(-1, block // 16, 16).sum(axis=1)
    while (half := lanes.shape[1] // 2) > 0:
        lanes = lanes[:, :half] + lanes[:, half:]
    found = lanes.reshape(rows.shape[0], filled.shape[1] // block) + 0.0  # no sum is -0
    return found[:, 0] if found.shape[1] == 1 else sums(found)


def quotients(gaps: np.ndarray, b: int) -> int:
    return int((gaps >> b).sum())


def rice_pack(gaps: np.ndarray, b: int, out: np.ndarray) -> None:
    """Write the Rice code of ``gaps`` to the start of ``out`` (uint8, zeros); see
    :mod:`hvd_compress.wire.frame`, of whose code the first byte is left out here."""
    split = full_bytes(gaps.size * b)
    out[:split] = pack_fields(gaps & ((1 << b) - 1), b)
    ends = np.cumsum(gaps >> b, dtype=np.int64)
    ends += np.arange(gaps.size)
    unary = np.zeros(int(ends[-1]) + 1, np.uint8)
    unary[ends] = 1
    packed = np.packbits(unary, bitorder="little")
    out[split : split + packed.size] = packed


def rice_unpack(code: np.ndarray, count: int, b: int, n: int) -> np.ndarray:
    """Return the ``count`` ascending indices (int64) within 0..n-1 that :func:`rice_pack` has coded
    as gaps.

    Raises:
        ValueError: ``code`` is none of ``count`` such indices, with at most 7 bytes of padding.
    """
    split = full_bytes(count * b)
    unary = np.unpackbits(code[split:], bitorder="little")
    ends = np.flatnonzero(unary.view(bool))
    if ends.size != count or unary.size - int(ends[-1]) > 64:
        raise ValueError(f"packed indices that are not {count}")
    number = np.arange(count)
    ends -= number  # zeros so far
    if (int(ends[-1]) + count) << b >= 2**62:
        raise ValueError("packed indices that are too large")
    ends <<= b
    ends += np.cumsum(unpack_fields(code[:split], count, b), dtype=np.int64)
    ends += number
    if ends[-1] >= n:
        raise ValueError(f"indices that are not ascending within 0..{n - 1}")
    return ends


def index_bits(gaps: np.ndarray, b: int) -> tuple[int, int, int, int, int]:
    """Return :func:`quotients` for b - 1, b and b + 1; ``b`` is from 1 to 47.  Then come the bits
    of the Elias gamma and delta codes of ``gaps``."""
    lengths = _length(gaps + 1)
    gamma, delta = 2 * lengths + 1, lengths + 2 * _length(lengths + 1) + 1
    below, at, above = (quotients(gaps, c) for c in (b - 1, b, b + 1))
    return below, at, above, int(gamma.sum()), int(delta.sum())


def elias_pack(gaps: np.ndarray, nested: bool, out: np.ndarray) -> None:
    """Write the Elias code of ``gaps``, gamma or with ``nested`` delta, to the start of ``out``
    (uint8, zeros).  It is that of :mod:`hvd_compress.wire.frame` without the first byte."""
    lengths = _length(gaps + 1)
    widths = _length(lengths + 1) if nested else lengths
    unary = np.zeros(int(widths.sum()) + widths.size, np.uint8)
    unary[np.cumsum(widths + 1) - 1] = 1
    streams = [unary, _fields_of(gaps + 1, lengths)]
    if nested:
        streams.insert(1, _fields_of(lengths + 1, widths))
    code = np.concatenate([np.packbits(bits, bitorder="little") for bits in streams])
    out[: code.size] = code


def elias_unpack(code: np.ndarray, count: int, nested: bool, n: int) -> np.ndarray:
    """Return the ``count`` ascending indices (int64) within 0..n-1 that :func:`elias_pack` has
    coded as gaps.

    Raises:
        ValueError: ``code`` is none of ``count`` such indices, with at most 7 bytes of padding.
    """
    bits = np.unpackbits(code, bitorder="little")
    ends = np.flatnonzero(bits)[:count]
    if ends.size != count or not count:
        raise ValueError(f"packed indices that are not {count}")
    widths = np.diff(ends, prepend=-1) - 1
    start = full_bytes(int(ends[-1]) + 1)
    for nesting in (True, False) if nested else (False,):
        if widths.max() > (5 if nesting else 48):
            raise ValueError("packed indices that are too large")
        stop = start + full_bytes(int(widths.sum()))
        if stop > code.size:
            raise ValueError("packed indices that end too early")
        values = _values_of(bits[8 * start : 8 * stop], widths)
        widths, start = values - 1, stop
    if code.size - stop > 7:
        raise ValueError(f"packed indices that are not {count}")
    if values.sum(dtype=np.float64) >= 2.0**62 or int(values.sum()) > n:
        raise ValueError(f"indices that are not ascending within 0..{n - 1}")
    return np.cumsum(values) - 1


def _length(x: np.ndarray) -> np.ndarray:
    """The integer part of log2 of positive integers up to 2**53."""
    return np.frexp(x.astype(np.float64))[1].astype(np.int64) - 1


def _fields_of(values: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """The ``widths`` low bits of each value end to end, the lowest first, a byte a bit."""
    starts = np.cumsum(widths) - widths
    bits = np.zeros(int(widths.sum()), np.uint8)
    for place in range(int(widths.max(initial=0))):
        some = widths > place
        bits[starts[some] + place] = (values[some] >> place) & 1
    return bits


def _values_of(bits: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Undo :func:`_fields_of`; above its field each value has a one."""
    starts = np.cumsum(widths) - widths
    values = np.int64(1) << widths
    for place in range(int(widths.max(initial=0))):
        some = widths > place
        values[some] |= bits[starts[some] + place].astype(np.int64) << place
    return values
