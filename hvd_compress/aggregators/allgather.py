"""Every rank's elements or codes are gathered by every rank, which adds them up in rank order."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from hvd_compress.aggregators.sparse_vectors import add_up
from hvd_compress.backends import backend_of
from hvd_compress.base import (
    Array,
    Context,
    Gather,
    Request,
    Sparse,
    SparseSum,
    State,
    Sum,
)
from hvd_compress.chain import Aggregated, Aggregator, Transform
from hvd_compress.codecs import Codec, logarithmic
from hvd_compress.codecs.base import Coder
from hvd_compress.codecs.frame import coded_size, decode_coded, encode_sent
from hvd_compress.codecs.places import coded
from hvd_compress.config import check_choice, converted
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.fused import FusedTopK, dense_is_less
from hvd_compress.operators import Selector, random_k, top_k
from hvd_compress.operators.classes import Classes
from hvd_compress.operators.random_k import own_generator
from hvd_compress.transforms import error_feedback, momentum_correction
from hvd_compress.wire import (
    decode,
    decode_sparse,
    dense_is_shorter,
    encode_dense,
    encode_sparse,
    sparse_size,
)
from hvd_compress.wire.frame import CODECS, index_dtype

#: how entries are added up
ALGORITHMS = ("allgather", "auto", "hierarchical", "recursive_doubling", "split_allgather")


def _as_values(values: Any) -> str | Codec:
    if isinstance(values, Codec):
        if values.varies:
            raise ConfigError(f"values={values!r}: its size varies; it can be sent only alone")
        return values
    if not isinstance(values, str):
        raise ConfigError(
            f"values must be 'float32', 'float16', '4bit' or a codec such as natural(); got "
            f"{values!r}"
        )
    check_choice("values", values, ("float32", "float16", "4bit"))
    return logarithmic(4) if values == "4bit" else values


@dataclasses.dataclass(frozen=True)
class allgather(Aggregator, name="allgather"):
    """Gather the elements that ``select`` picks, or all of them, coded.

    Options:
        select: an operator that picks elements, such as ``top_k``; or a codec, which takes all.
        values: how the picked values are sent: "float32", "float16" (values beyond its range
            are sent as its largest, and error feedback keeps the rest), "4bit", which is
            ``logarithmic(4)``, or another codec.
        indices: "packed", about log2(n / k) + 1.5 bits each, in messages whose size is not known
            beforehand; or "int32" (int64 in tensors of more than 2^31 elements).
        algorithm: "allgather" delivers all ranks' entries to every rank, which adds them in rank
            order.  Over MPI also "split_allgather", where each rank adds up one region,
            "recursive_doubling", "hierarchical", which adds up inside of nodes first, and "auto",
            what a model measured on the communicator expects to be fastest; see
            docs/sparse-collectives.md.  Values as they are or in float16.

    An allgather delivers P messages to everyone, an allreduce about two dense arrays.  Where the
    former is more (density 25 % on more than 4 ranks, say), uncoded values at the same places are
    sent in a dense sum instead: the result is the same up to the order of additions.
    """

    select: Selector | Codec = top_k()
    values: str | Codec = dataclasses.field(default="float32", metadata=converted(_as_values))
    algorithm: str = "allgather"
    indices: str = "packed"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("algorithm", self.algorithm, ALGORITHMS)
        check_choice("indices", self.indices, CODECS)
        if self.algorithm != "allgather" and not (
            isinstance(self.select, Selector) and isinstance(self.values, str)
        ):
            raise ConfigError(
                f"algorithm={self.algorithm!r} adds plain values on their way, and codes cannot be "
                "added: algorithm='allgather'"
            )
        if not isinstance(self.select, Selector | Codec) or isinstance(self.select, random_k):
            raise TypeError(
                "allgather(select=...) takes an operator such as top_k(), or a codec; got "
                f"{self.select!r}"
            )
        if isinstance(self.select, Codec) and self.values != "float32":
            raise TypeError(
                f"allgather({self.select.name}(), values=...): the values are coded already"
            )

    @property
    def keys(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.select.keys if isinstance(self.select, Selector) else ()

    def init(self, x: Array, shape: tuple[int, ...]) -> State:
        return self.select.init(x) if isinstance(self.select, Selector) else {}

    def check_feedback(self, shape: tuple[int, ...], context: Context) -> None:
        n = math.prod(shape)
        if isinstance(self.select, Codec):
            self.select.for_shape(shape).check_feedback(n)
        elif isinstance(self.values, Codec):
            self.values.check_feedback(self.select.count(n, context) or n)

    def classes(self, d: int, context: Context | None = None) -> Classes:
        """Return the constants of the operator, of the codec, or of the one followed by the other:
        codes of top-k have alpha k/d times the codec's, its beta, and d/k times its delta.  What is
        lost by rounding float64 to float32 is not counted."""
        if isinstance(self.select, Codec):
            return self.select.classes(d)
        if self.values == "float16":
            raise UnsupportedError("float16 has no constants: it loses what is below 2^-25")
        if not isinstance(self.values, Codec):
            return self.select.classes(d, context)
        context = context or Context()
        k = self.select.count(d, context)
        codes = self.values.classes(d if k is None else k)
        return codes if k == d else codes.after_selecting(self.select.kept(d, context))

    def fused(self, transforms: Sequence[Transform], context: Context) -> FusedTopK | None:
        if not (isinstance(self.select, top_k) and isinstance(self.values, str | logarithmic)):
            return None
        *before, last = transforms or (None,)
        correction, nesterov = None, False
        if before and isinstance(last_before := before[-1], momentum_correction):
            correction = last_before
            del before[-1]
            _, nesterov = correction.in_use(context)
        if self.algorithm != "allgather" or type(last) is not error_feedback:
            return None
        if any(t.keys for t in before) or last.units != "gradient":
            return None
        return FusedTopK(
            tuple(before),
            self.select,
            correction,
            nesterov,
            self.values,
            self.indices,
            context.size,
        )

    def aggregate(
        self, x: Array, state: State, context: Context
    ) -> Generator[Request, Any, Aggregated]:
        if isinstance(self.select, Codec):
            return (yield from _everything(self.select.for_shape(context.shape), x, context))
        xp = backend_of(x)
        n = xp.size(x)
        k = self.select.count(n, context)
        if k == n and isinstance(self.values, Codec):
            aggregated = yield from _everything(self.values, x, context)
            return aggregated._replace(state=state)
        if k == n:
            total = yield Sum(x)
            mean = total / context.size
            return Aggregated(mean, x, xp.all_finite(mean), state)
        indices, state = self.select.pick(x, k, state, context)
        values = xp.take(x, indices)
        if self.algorithm != "allgather":
            wire = None if self.values == "float32" else str(self.values)
            own = Sparse(indices, values)
            aggregated = yield from _by_algorithm(x, own, wire, self.algorithm, context.size)
        elif isinstance(self.values, Codec):
            aggregated = yield from _coded(
                self.values, x, indices, values, k, context, self.indices
            )
        else:
            aggregated = yield from _plain(
                self.values, x, indices, values, k, context, self.indices
            )
        return aggregated._replace(state=state)


def _by_algorithm(
    x: Array, own: Sparse, wire: str | None, algorithm: str, size: int
) -> Generator[Request, Any, Aggregated]:
    """The engine adds vectors up on their way; what it has to round off stays here."""
    xp = backend_of(x)
    n, dtype = xp.size(x), xp.dtype(x)
    own = own._replace(values=xp.round_to(own.values, wire, saturate=True))
    total, dropped, *_ = yield SparseSum(own, n, wire, algorithm)

    def arrived(*parts: np.ndarray) -> list[np.ndarray]:
        mine, lost = Sparse(*parts[:2]), Sparse(parts[2], -parts[3])
        return list(add_up([mine, lost], n, dtype))

    looks = [("int64", None), (dtype, None)]
    indices, values = xp.on_host(arrived, [*own, *dropped], looks, x)
    return Aggregated(total / size, Sparse(indices, values), xp.all_finite(total))


def _plain(
    dtype: str,
    x: Array,
    indices: Array,
    values: Array,
    k: int | None,
    context: Context,
    codec: str,
) -> Generator[Request, Any, Aggregated]:
    xp = backend_of(x)
    n = xp.size(x)
    values = xp.round_to(values, dtype, saturate=True)
    sent = Sparse(indices, values)
    if k is not None and dense_is_less(n, k, dtype, context.size):
        total = yield Sum(xp.put(xp.zeros(n, x), indices, values))
        mean = total / context.size
        return Aggregated(mean, sent, xp.all_finite(mean))
    size = None if k is None or codec == "packed" else sparse_size(k, n, dtype)
    (frame,) = xp.on_host(
        functools.partial(_encode_plain, n, k, codec),
        [indices, xp.cast(values, dtype)],
        [("uint8", size)],
        x,
    )
    frames = yield Gather(frame, equal_sizes=size is not None)
    parts = xp.on_host(
        functools.partial(_decode_plain, n, dtype, k),
        frames,
        [(index_dtype(n), k), (dtype, k)] * context.size,
        x,
    )
    return _added(x, parts, sent, context)


def _coded(
    codec: Codec,
    x: Array,
    indices: Array,
    values: Array,
    k: int | None,
    context: Context,
    packing: str,
) -> Generator[Request, Any, Aggregated]:
    """The values as codes behind their indices."""
    xp = backend_of(x)
    n, dtype = xp.size(x), np.dtype(xp.dtype(x))
    # Where the size may vary, indices may be packed; many of them would outweigh their codes.
    packed = k is None or packing == "packed"

    def encode(step: int, indices: np.ndarray, values: np.ndarray) -> list[np.ndarray]:
        random = own_generator(context._replace(step=step))
        return list(encode_sent(codec, values, random, indices, n, packed=packed))

    def decode(*frames: np.ndarray) -> list[np.ndarray]:
        parts: list[Any] = []
        for rank, frame in enumerate(frames):
            parts += decode_coded(codec, frame, k, dtype, n, sender=f"rank {rank}")
        return parts

    size = None if k is None or packed else coded_size(codec, k, dtype, n)
    frame, decoded = xp.on_host(
        encode, [context.step, indices, values], [("uint8", size), (dtype.name, k)], x
    )
    frames = yield Gather(frame, equal_sizes=not packed)
    parts = xp.on_host(decode, frames, [(index_dtype(n), k), (dtype.name, k)] * context.size, x)
    return _added(x, parts, Sparse(indices, decoded), context)


def _added(x: Array, parts: list[Array], sent: Sparse, context: Context) -> Aggregated:
    """``parts``: every rank's indices and values in turn."""
    xp = backend_of(x)
    mean = xp.zeros(xp.size(x), x)
    for at, what in zip(parts[::2], parts[1::2], strict=True):
        mean = xp.add_at(mean, at, xp.cast(what, xp.dtype(x)))
    # Dividing the few nonzero elements would be cheaper, but they are not unique.
    mean /= context.size
    return Aggregated(mean, sent, xp.all_finite(xp.concat(parts[1::2])))


def _everything(codec: Codec, x: Array, context: Context) -> Generator[Request, Any, Aggregated]:
    xp = backend_of(x)
    n, dtype = xp.size(x), np.dtype(xp.dtype(x))

    def encode(coder: Coder, step: int, x: Array) -> list[Array]:
        return list(encode_sent(coder, x, own_generator(context._replace(step=step))))

    def add_up(coder: Coder, *frames: np.ndarray) -> list[Array]:
        total = coder.zeros(n, dtype)
        for rank, frame in enumerate(frames):
            decode_coded(coder, frame, n, dtype, sender=f"rank {rank}", out=total, add=True)
        return [total]

    size = None if codec.varies else coded_size(codec, n, dtype)
    frame, sent = coded(codec, encode, [context.step, x], [("uint8", size), (dtype.name, n)], x)
    frames = yield Gather(frame, equal_sizes=size is not None)
    (total,) = coded(codec, add_up, frames, [(dtype.name, n)], x)
    mean = total / context.size
    return Aggregated(mean, sent, xp.all_finite(mean))


def _encode_plain(
    n: int, k: int | None, codec: str, indices: np.ndarray, values: np.ndarray
) -> list[np.ndarray]:
    if k is None and dense_is_shorter(indices.size, n, values.dtype.name, codec):
        dense = np.zeros(n, values.dtype)
        dense[indices] = values
        return [encode_dense(dense)]
    return [encode_sparse(indices, values, n, codec)]


def _decode_plain(n: int, values: str, k: int | None, *frames: np.ndarray) -> list[np.ndarray]:
    """Indices and values of every frame in turn; ``k`` of them, or ``None``."""
    parts: list[np.ndarray] = []
    for rank, frame in enumerate(frames):
        sender = f"rank {rank}"
        if k is None:
            indices, decoded = decode(frame, n, values, sender=sender)
        else:
            indices, decoded = decode_sparse(frame, n, values, k, sender=sender)
        if indices is None:
            indices = np.arange(n)
        parts += [indices.astype(index_dtype(n), copy=False), decoded]
    return parts
