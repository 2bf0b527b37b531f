"""The option ``rows`` of a method: how rows of sparse gradients, those of embeddings, are sent.

Such a gradient has values for the rows that were touched in a step, and none for all others:

* ``"whole"``: everything, without loss.
* ``"float16"``, ``"bfloat16"``: values in 16 bits; rounding errors are lost.
* ``"int8"``, ``"float8"``: 8 bits per value and a scale per row, by the codecs ``linear`` (255
  levels) and ``float8`` (E4M3), with error feedback.
* ``"top:0.1"``: among the touched rows the k = ceil(0.1 * rows) with the largest L2 norm, with
  error feedback; at least one if there are any.
* ``"top:0.1:int8"``: both; the last part may be any of the names above.

Error feedback is row by row: a touched row is its gradient plus its residual.  The part that is not
sent becomes its new residual.  Rows that are not touched wait, and do not compete for a
place.  The work of a step is proportional to the touched rows, not to the matrix.

State: ``residual``, dense, as large as the matrix, in the dtype in which gradients are accumulated.

References: Aji and Heafield, EMNLP 2017, for top-k; Seide et al., Interspeech 2014, for error
feedback.

Difference from these: whole rows are chosen, by their norms.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Compressor, Context, State
from hvd_compress.chain import in_range
from hvd_compress.codecs import Codec, float8, linear
from hvd_compress.codecs.frame import decode_coded, encode_sent
from hvd_compress.codecs.top_k import count
from hvd_compress.config import check_fraction
from hvd_compress.errors import ConfigError
from hvd_compress.requests import Gather, Request
from hvd_compress.requests.dense import itemsize
from hvd_compress.wire.rows import decode_rows, encode_rows

_HALVES = ("float16", "bfloat16")
_CODED = ("int8", "float8")

#: rows of the same numbers added up: of (indices, values) to (ascending indices, values)
Merge = Callable[[Array, Array], tuple[Array, Array]]


@dataclasses.dataclass(frozen=True)
class Rows:
    """The form in which a rank sends the rows that it has touched; :func:`as_rows` reads it from a
    text.

    Options:
        density: the fraction of them that is sent.
        values: "whole", "float16", "bfloat16", "int8" or "float8".
    """

    density: float = 1.0
    values: str = "whole"

    @property
    def keeps_residual(self) -> bool:
        """Whether there is error feedback."""
        return self.density < 1 or self.values in _CODED

    def codec(self, width: int) -> Codec | None:
        """Return the codec of rows of ``width`` values; ``None`` if they are sent as numbers."""
        if self.values not in _CODED or not width:
            return None
        return linear(8, column=width) if self.values == "int8" else float8(bucket=width)

    def on_wire(self, dtype: str) -> str:
        """Return the dtype in which values of ``dtype`` are sent, if as numbers."""
        return self.values if self.values in _HALVES and itemsize(dtype) > 2 else dtype

    def select(self, x: np.ndarray) -> list[np.ndarray]:
        """Return the ascending places (int64) of the rows of ``x`` that are sent.

        Among rows with equal norms the first are taken.  Rows that are not finite come before all
        others, so that all ranks see them.
        """
        wide = x.astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            norms = np.einsum("ij,ij->i", wide, wide)
        norms[~np.isfinite(norms)] = np.inf
        order = np.argsort(-norms, kind="stable")
        return [np.sort(order[: count(len(x), self.density)])]

    def encode(self, indices: Array, values: Array, n: int, dtype: str) -> tuple[Array, Array]:
        """Return the message (1-D, uint8) of rows at ascending ``indices`` of ``n``, and their
        values as receivers read them.

        Args:
            values: shape (m, width), in the dtype in which they are accumulated.
            dtype: that of the gradient.
        """
        xp = backend_of(values)
        wide, width = xp.dtype(values), math.prod(xp.shape(values)[1:])
        if (codec := self.codec(width)) is None:
            narrow = xp.cast(values, self.on_wire(dtype))

            def framed(places: np.ndarray, raw: np.ndarray) -> list[np.ndarray]:
                return [encode_rows(places, raw, n)]

            inputs = [indices, xp.to_bytes(narrow)]
            (message,) = xp.on_host(framed, inputs, [("uint8", None)], values)
            return message, xp.cast(narrow, wide)

        def encoded(places: np.ndarray, flat: np.ndarray) -> list[np.ndarray]:
            return list(encode_sent(codec, flat, _NEVER_USED, places, n, packed=True, row=width))

        inputs = [indices, xp.reshape(values, (-1,))]
        message, sent = xp.on_host(encoded, inputs, [("uint8", None), (wide, None)], values)
        return message, sent

    def decode(
        self, message: Array, like: Array, n: int, dtype: str, sender: str = "a rank"
    ) -> tuple[Array, Array]:
        """Return ``(indices, values)`` of a message, values of shape (m, width).

        Args:
            like: rows as the sender's, shape (any, width), in the same dtype.
            dtype: that of the gradient.
        """
        xp = backend_of(like)
        wide, width = xp.dtype(like), math.prod(xp.shape(like)[1:])
        codec, wire = self.codec(width), self.on_wire(dtype)

        def decoded(message: np.ndarray) -> list[np.ndarray]:
            if codec is None:
                return list(decode_rows(message, n, width * itemsize(wire), sender=sender))
            kind = np.dtype(wide)
            found, theirs = decode_coded(codec, message, None, kind, n, row=width, sender=sender)
            assert found is not None
            return [found.astype(np.int64), theirs]

        looks = [("int64", None), ("uint8" if codec is None else wide, None)]
        found, theirs = xp.on_host(decoded, [message], looks, like)
        if codec is None:
            theirs = xp.cast(xp.from_bytes(theirs, wire, like), wide)
        return found, xp.reshape(theirs, (xp.size(found), width))


@functools.cache
def as_rows(text: str) -> Rows:
    """Return what a value of the option ``rows`` means; see the module's docstring.

    >>> as_rows("top:0.1:int8")
    Rows(density=0.1, values='int8')
    """
    density, values = 1.0, text
    if isinstance(text, str) and text.startswith("top:"):
        fraction, _, values = text.removeprefix("top:").partition(":")
        try:
            density = float(fraction)
        except ValueError:
            raise _unknown(text) from None
        check_fraction("rows='top:...'", density)
        values = values or "whole"
    if values not in ("whole", *_HALVES, *_CODED):
        raise _unknown(text)
    return Rows(density, values)


def checked_rows(text: str) -> str:
    """Return a value of the option ``rows`` that :func:`as_rows` can read, or raise."""
    if not isinstance(text, str):
        raise _unknown(text)
    as_rows(text)
    return text


def _unknown(text: Any) -> ConfigError:
    return ConfigError(
        "rows must be 'whole', 'float16', 'bfloat16', 'int8' or 'float8', or of the rows with the "
        f"largest norms 'top:0.1' or 'top:0.1:int8'; got {text!r}"
    )


def keeps_residual(method: Compressor) -> bool:
    """Return whether a method, or one that it is composed of, keeps a residual of rows."""
    parts = [part for part in method.parts if isinstance(part, Compressor)]
    return any(map(keeps_residual, parts)) if parts else as_rows(method.rows).keeps_residual


def rows_state(method: Compressor, gradient: Array) -> State:
    """Return what rows of a matrix need before the first step, beside ``method.init(gradient)``:
    the residual, if there is one."""
    if not keeps_residual(method):
        return {}
    xp = backend_of(gradient)
    return {"residual": xp.zeros(xp.size(gradient), xp.widen(gradient[:0]))}


class Averaged(NamedTuple):
    """The result of an exchange of rows.

    Attributes:
        indices, values: of the average over the ranks, each row once, in ascending order.
        sent: the values that this rank sent, as the others saw them.
        left: the new residual of the rows that this rank has touched; ``None`` without a residual.
    """

    indices: Array
    values: Array
    sent: Array
    left: Array | None


def exchange_rows(
    rows: Rows,
    indices: Array,
    values: Array,
    *,
    waiting: Array | None,
    n: int,
    context: Context,
    merge: Merge,
) -> Generator[Request, Any, Averaged]:
    """Average rows over the ranks.

    Args:
        indices: of this rank's rows, ascending and without duplicates (int64, shape (m,)).
        values: of these rows, shape (m, width), of any dtype if there is no residual.
        waiting: the residual of these rows, shape (m, width), if ``rows.keeps_residual``.
        n: rows of the whole matrix.
        merge: adds up rows of several ranks.

    After a NaN or Inf on one rank, or an overflow of the average, ``values`` are not finite on all
    ranks.  Residuals then stay as they were.
    """
    xp = backend_of(values)
    dtype, width = xp.dtype(values), math.prod(xp.shape(values)[1:])
    x = values
    if waiting is not None:
        x = xp.reshape(xp.widen(values), (xp.size(indices), width)) + waiting
    places, own, chosen = indices, x, None
    if rows.density < 1 and width:
        (chosen,) = xp.on_host(rows.select, [x], [("int64", None)], x)
        places, own = xp.take(indices, chosen), xp.take(x, chosen)
    message, sent = rows.encode(places, own, n, dtype)
    messages = yield Gather(message)
    arrived = [rows.decode(x, own, n, dtype, f"rank {i}") for i, x in enumerate(messages)]
    everyones, theirs = zip(*arrived, strict=True)
    found, total = merge(xp.concat(list(everyones)), xp.concat(list(theirs)))
    mean = total / context.size
    if waiting is None:
        return Averaged(found, mean, sent, None)
    mean = xp.cast(mean, dtype)

    def settled() -> Array:
        left = own - xp.reshape(sent, (xp.size(places), width))
        return left if chosen is None else xp.put(x, chosen, left)

    def restored() -> Array:
        return in_range({"residual": waiting})["residual"]

    return Averaged(found, mean, sent, xp.choose(xp.all_finite(mean), settled, restored))


#: codecs of rows round to the nearest
_NEVER_USED = np.random.default_rng(0)
