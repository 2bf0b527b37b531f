"""One rank after the other says which elements all ranks send."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Coding, Context, Sparse, State
from hvd_compress.chain import Aggregated, Aggregation, Aggregator
from hvd_compress.codecs import top_k
from hvd_compress.codecs.at_random import own_generator
from hvd_compress.codecs.base import Codec
from hvd_compress.codecs.floats import plain
from hvd_compress.codecs.frame import coded_size, decode_coded, encode_coded
from hvd_compress.config import converted
from hvd_compress.errors import PayloadError
from hvd_compress.meetings.averaging import summed, whole
from hvd_compress.meetings.elements import elements
from hvd_compress.requests import Gather, Request, Sum
from hvd_compress.schedules import Density, as_density
from hvd_compress.wire.frame import index_dtype


@dataclasses.dataclass(frozen=True)
class leader_top_k(Aggregator, name="leader_top_k"):
    """The leader, rank ``step mod N``, sends the indices of its k = ceil(density * n) largest
    elements to all.  The values of all ranks there are summed.

    Options:
        density: a fraction or a schedule.

    Reference: Chen et al., ScaleCom, NeurIPS 2020, where it is called CLT-k.

    >>> world = World(chain(via=leader_top_k(0.25)), size=2)
    >>> gradients = [np.array([4.0, 3.0, 0.0, 0.0]), np.array([1.0, 0.0, 6.0, 3.0])]
    >>> [world.exchange(gradients)[0].mean.tolist() for step in range(2)]
    [[2.5, 0.0, 0.0, 0.0], [0.0, 0.0, 3.0, 0.0]]
    """

    density: Density = dataclasses.field(default=0.001, metadata=converted(as_density))

    is_coarse = True

    @property
    def _select(self) -> top_k:
        return top_k(self.density)

    def coding(self, n: int, context: Context) -> Coding:
        return whole() if self._select.count(n, context) == n else elements(self._select)

    def aggregate(self, x: Array, state: State, context: Context) -> Aggregation:
        xp = backend_of(x)
        k = self._select.count(xp.size(x), context)
        if k == xp.size(x):
            return (yield from summed(x, state, context))
        (indices,), _ = yield from leaders_choice([LeaderSelection(self._select, x, k, context)])
        values = xp.take(x, indices)
        total = yield Sum(values)
        values_mean = xp.divided(total, context.size)
        mean = xp.put(xp.zeros(xp.size(x), x), indices, values_mean)
        return Aggregated(mean, Sparse(indices, values), xp.all_finite(values_mean))


class LeaderSelection(NamedTuple):
    """The ``k`` elements of a flat tensor that ``select`` finds."""

    select: top_k
    x: Array
    k: int
    context: Context


def leaders_choice(
    selections: Sequence[LeaderSelection],
    more: Callable[[list[Array]], Array] | None = None,
    size: int = 0,
) -> Generator[Request, Any, tuple[list[Array], Array]]:
    """Return, on all ranks, the indices that the leader, rank ``step mod N``, selects in each of
    some tensors.  With them come the ``size`` numbers that ``more(indices)`` gives there, if any.
    All are one message: indices into all tensors, end to end."""
    x, context = selections[0].x, selections[0].context
    xp = backend_of(x)
    dtype = np.dtype(xp.dtype(x))
    counts = [selection.k for selection in selections]
    bounds = [0, *itertools.accumulate(xp.size(selection.x) for selection in selections)]
    k, n = sum(counts), bounds[-1]
    is_leader = context.step % context.size == context.rank

    def encode(step: Any, indices: np.ndarray, numbers: np.ndarray) -> list[np.ndarray]:
        if int(step) % context.size != context.rank:
            return [np.zeros(0, np.uint8)]
        random = own_generator(context._replace(step=int(step)))
        nothing = np.zeros(k, dtype)
        frames = [encode_coded(no_values(), nothing, random, indices, n, packed=True)]
        if size:
            frames.append(encode_coded(plain(), numbers, random))
        return [np.concatenate(frames)]

    def decode(step: Any, *frames: np.ndarray) -> list[np.ndarray]:
        leader = int(step) % context.size
        for rank, frame in enumerate(frames):
            if rank != leader and frame.size:
                raise PayloadError(
                    f"bad payload from rank {rank}: it takes itself for the leader, but at "
                    f"step {step} that is rank {leader}; the ranks' steps must be the same"
                )
        sender, frame = f"rank {leader}", frames[leader]
        split = max(0, frame.size - (coded_size(plain(), size, dtype) if size else 0))
        indices, _ = decode_coded(no_values(), frame[:split], k, dtype, n, sender=sender)
        assert indices is not None
        if np.diff(np.searchsorted(indices, bounds)).tolist() != counts:
            raise PayloadError(
                f"bad payload from {sender}: it has not {counts} indices into tensors that end at "
                f"{bounds[1:]}; the ranks must have the same tensors and options"
            )
        numbers = np.zeros(0, dtype)
        if size:
            _, numbers = decode_coded(plain(), frame[split:], size, dtype, sender=sender)
        return [indices, numbers]

    def chosen() -> tuple[Array, Array]:
        own = [each.select.select(each.x, each.k, each.context) for each in selections]
        end_to_end = [
            indices + start if start else indices
            for indices, start in zip(own, bounds, strict=False)
        ]
        return joined(xp, end_to_end), more(own) if more else x[:0]

    own, numbers = xp.choose(is_leader, chosen, lambda: (xp.cast(x[:0], "int64"), x[:0]))
    (frame,) = xp.on_host(encode, [context.step, own, numbers], [("uint8", None)], x)
    frames = yield Gather(frame)
    indices, numbers = xp.on_host(
        decode, [context.step, *frames], [(index_dtype(n), k), (dtype.name, size)], x
    )
    cuts = itertools.pairwise([0, *itertools.accumulate(counts)])
    found = [indices[start:stop] for start, stop in cuts]
    indices = [own - start if start else own for own, start in zip(found, bounds, strict=False)]
    return indices, numbers


def joined(xp: Any, arrays: Sequence[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else xp.concat(arrays)


class no_values(Codec):
    """For a frame of indices alone."""

    def __repr__(self) -> str:
        return "indices"

    def size(self, n: int, dtype: np.dtype) -> int:
        return 0

    def encode(self, x: np.ndarray, random: np.random.Generator) -> np.ndarray:
        return np.zeros(0, np.uint8)

    def decode(self, code: np.ndarray, n: int, dtype: np.dtype) -> np.ndarray:
        return np.zeros(n, dtype)
