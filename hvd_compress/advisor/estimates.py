"""Costs of methods for a model of any size, found in some seconds: measured on a sample of tensors,
or taken from what is kept of another model."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping

from hvd_compress.advisor.pieces import Messages, Piece, kept, measured
from hvd_compress.advisor.shapes import MODELS, Shapes
from hvd_compress.kernels.low_rank import matrix_shape
from hvd_compress.methods import PowerSGD, as_compressor
from hvd_compress.reduce.buckets import BUCKET_BYTES

#: elements of a sample, on which a method takes some tenths of a second
_ELEMENTS = 2**20
#: no tensor is more of a sample than this
_MOST = _ELEMENTS // 8
#: the model whose kept pieces stand for others
_LIKE = "resnet50"


def elements_of(shapes: Shapes) -> int:
    """Return the number of elements of all tensors."""
    return sum(map(math.prod, shapes.values()))


def sampled(shapes: Shapes, elements: int = _ELEMENTS) -> Shapes:
    """Return some tensors that stand for all: every so-manieth by size, and of large ones a part of
    their longest dimension."""
    total = elements_of(shapes)
    if total <= elements:
        return dict(shapes)
    by_size = sorted(shapes, key=lambda name: (math.prod(shapes[name]), name))
    stride = min(total / elements, max(len(by_size) / 8, 1.0))
    count = math.ceil(len(by_size) / stride)
    # From the middle of each stride, so that neither small nor large ones have the advantage.
    places = [min(int((i + 0.5) * stride), len(by_size) - 1) for i in range(count)]
    return {by_size[place]: _shrunk(shapes[by_size[place]]) for place in places}


def _shrunk(shape: tuple[int, ...]) -> tuple[int, ...]:
    if (size := math.prod(shape)) <= _MOST:
        return shape
    longest = max(range(len(shape)), key=lambda i: shape[i])
    length = max(int(shape[longest] * _MOST / size), 1)
    return tuple(length if i == longest else n for i, n in enumerate(shape))


def scaled(piece: Piece, factor: float, elements: int, speed: float = 1.0) -> Piece:
    """Return the piece of a model that is ``factor`` times as large, of ``elements`` float32
    elements, on a processor that takes ``speed`` times as long."""
    buckets = max(piece.buckets, math.ceil(4 * elements / BUCKET_BYTES))
    if factor < 1:
        buckets = max(math.ceil(piece.buckets * factor), 1)
    more = buckets / piece.buckets
    messages = {
        kind: Messages(
            round(m.whole * factor),
            round(m.shared * factor),
            max(round(m.exchanges * more), 1),
        )
        for kind, m in piece.messages.items()
    }
    seconds = {name: getattr(piece, name) * factor * speed for name in ("before", "after", "each")}
    return dataclasses.replace(piece, messages=messages, buckets=buckets, **seconds)


def estimated(
    methods: Iterable[str],
    shapes: Shapes,
    *,
    seconds: float = math.inf,
    now: Callable[[], float] = time.perf_counter,
) -> dict[str, Piece]:
    """Return what methods cost on these shapes, by method: measured here on a sample.  "none" and
    "fp16" are always among them.

    Args:
        methods: by name, the most important first.
        shapes: of the parameters by name.
        seconds: after which no further method is measured; those that are left get what is kept of
            them, scaled, or are left out.
        now: a clock.
    """
    sample, total = sampled(shapes), elements_of(shapes)
    factor, end = total / max(elements_of(sample), 1), now() + seconds
    pieces: dict[str, Piece] = {}
    for method in dict.fromkeys(("fp16", "none", *methods)):
        if len(pieces) < 2 or now() < end:
            piece = scaled(measured(method, sample, steps=2), factor, total)
            pieces[method] = _with_bytes(method, piece, shapes)
    return scaled_from_kept(methods, total, pieces) | pieces


def _with_bytes(method: str, piece: Piece, shapes: Shapes) -> Piece:
    """Return a piece with the bytes of the shapes themselves, where they are no multiple of a
    sample's: two factors of a large matrix are a smaller part of it than those of a small one."""
    power = as_compressor(method)
    if not isinstance(power, PowerSGD):
        return piece
    values = 0
    for shape in shapes.values():
        n, m = matrix_shape(shape)
        whole = not power.compresses(shape)
        values += n * m if whole else min(n, m, power.rank) * (n + m) // (1 + power.alternate)
    sums = piece.messages["sum"]._replace(whole=4 * values, shared=0)
    return dataclasses.replace(piece, messages={**piece.messages, "sum": sums})


def scaled_from_kept(
    methods: Iterable[str], elements: int, here: Mapping[str, Piece]
) -> dict[str, Piece]:
    """Return what methods would cost by the kept pieces of a model, scaled by the number of
    elements and by how long "fp16" takes ``here``; methods without a kept piece are left out."""
    known = kept(_LIKE)
    factor = elements / elements_of(MODELS[_LIKE]())
    fp16 = scaled(known["fp16"], factor, elements)
    speed = here["fp16"].processor(2) / fp16.processor(2) if fp16.processor(2) else 1.0
    return {m: scaled(known[m], factor, elements, speed) for m in methods if m in known}
