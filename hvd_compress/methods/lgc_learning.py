"""Learning on the way: the base of the aggregators that send the latent of an autoencoder."""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import math
import re
import warnings
from collections.abc import Generator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, Sparse, State
from hvd_compress.chain import Aggregated, Aggregation, Aggregator
from hvd_compress.codecs import top_k
from hvd_compress.codecs.floats import plain
from hvd_compress.codecs.frame import coded_size, decode_coded, encode_coded
from hvd_compress.codecs.top_k import count
from hvd_compress.config import check_fraction, checked, converted
from hvd_compress.errors import ConfigError, PoorFit
from hvd_compress.meetings.leader_top_k import LeaderSelection, joined, leaders_choice
from hvd_compress.methods.lgc_layout import LEAST, first_weights
from hvd_compress.methods.lgc_network import network_of
from hvd_compress.requests import Gather, Joint, Request, Sum
from hvd_compress.schedules import After, Start, as_start, started

#: of Adam: how its two moments decay, and what keeps its quotient finite
_FIRST, _SECOND, _EPSILON = 0.9, 0.999, 1e-8
#: of the averages in "quality"
_DECAY = 0.9
#: ranks below this cosine are not alike; decoding that loses more than this is of no use
_ALIKE, _LOST = 0.05, 0.95
#: avoids 0 / 0
_TINY = 1e-30


def settled_after(settled: Start | None, start: Start) -> Start:
    """Return ``settled``, or else a schedule that begins later than ``start`` by more than one
    step, since a non-finite step is undone.  It is an option, because graphs of TensorFlow have a
    branch for each stage of the schedules that are options."""
    if settled is not None:
        return as_start(settled)
    if isinstance(start, After):
        return After(start.unit, start.stage_length + (3 if start.unit == "step" else 1))
    return After("step", 3) if start else False


class CodedTensor(NamedTuple):
    """A flat tensor whose selected elements an autoencoder codes, with its state."""

    via: Learned
    x: Array
    state: State
    context: Context

    @property
    def k(self) -> int:
        return count(backend_of(self.x).size(self.x), self.via.density)


class SelectedValues(NamedTuple):
    """The elements of some tensors that were selected: their indices in each, and this rank's
    values end to end."""

    parts: Sequence[CodedTensor]
    indices: list[Array]
    values: Array

    def spread(self, mean: Array, sent: Array) -> list[Aggregated]:
        """Return the result of each tensor, given those of the elements, end to end."""
        results, counts = [], [part.k for part in self.parts]
        for part, indices, (start, stop) in zip(
            self.parts, self.indices, bounds(counts), strict=True
        ):
            xp, own = backend_of(part.x), mean[start:stop]
            results.append(
                Aggregated(
                    xp.put(xp.zeros(xp.size(part.x), part.x), indices, own),
                    Sparse(indices, sent[start:stop]),
                    xp.all_finite(own),
                )
            )
        return results


def bounds(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return (start, stop) of each of some arrays, given their sizes, if they are end to end."""
    return list(itertools.pairwise([0, *itertools.accumulate(counts)]))


def selected(
    parts: Sequence[CodedTensor], more: Any = None, size: int = 0
) -> Generator[Request, Any, tuple[SelectedValues, Array]]:
    """Return what the leader selects, and the ``size`` numbers that ``more`` makes of the values
    there."""
    xp = backend_of(parts[0].x)

    def values_at(indices: Sequence[Array]) -> Array:
        taken = [xp.take(part.x, own) for part, own in zip(parts, indices, strict=True)]
        return joined(xp, taken)

    selections = [LeaderSelection(part.via._select, part.x, part.k, part.context) for part in parts]
    found, numbers = yield from leaders_choice(
        selections, (lambda indices: more(values_at(indices))) if more else None, size
    )
    return SelectedValues(parts, found, values_at(found)), numbers


@dataclasses.dataclass(frozen=True)
class Learned(Aggregator):
    """The base: a leader chooses the k = ceil(density * n) elements that are largest on it, and all
    ranks take theirs at the same places.  Until ``start`` every rank sends its values to all, which
    make the same step of Adam; from then on, only latents are sent.

    One autoencoder codes the elements of all tensors of a dtype and device, end to end in the order
    of the tensors' names.  Fewer than 31 elements are summed as they are.

    State, equal on all ranks: ``autoencoder``, ``first_moment``, ``second_moment`` and ``quality``.
    The latter has averages of the mean cosine between the values of two ranks, and of the share of
    the energy that decoding loses.  Its last entry is the number of training steps.  A tensor in
    its first step, for which there is no bucket yet, is coded alone.

    Results of frameworks may differ between ranks in their last bits, and so may weights.  So all
    ranks take over those of rank 0 until ``settled``, by default a few steps after ``start``, and
    decode in NumPy, on the host.
    """

    density: float = checked(check_fraction, 0.001)
    start: Start = dataclasses.field(default=300, metadata=converted(as_start))
    rate: float = checked(check_fraction, 0.003)
    settled: Start | None = None

    keys = ("autoencoder", "first_moment", "second_moment", "quality")
    per_rank = False
    decoders: ClassVar[int] = 1
    innovation: ClassVar[float] = 0.0

    @property
    def _select(self) -> top_k:
        return top_k(self.density)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "settled", settled_after(self.settled, self.start))

    def fits(self, n: int) -> bool:
        """Return whether some of ``n`` elements are selected, and not all."""
        return 0 < count(n, self.density) < n

    def init(self, x: Array, shape: tuple[int, ...]) -> State:
        n = math.prod(shape)
        if not self.fits(n):
            raise ConfigError(
                f"density={self.density} takes {count(n, self.density)} of {n} elements, and the "
                f"autoencoder needs from 1 to {n - 1}: leader_top_k() for this tensor"
            )
        return {}

    def common(self, x: Array) -> State:
        xp = backend_of(x)
        first = xp.from_numpy(first_weights(self.decoders, self.innovation > 0), x)
        weights = xp.cast(first, xp.dtype(x))
        return {
            "autoencoder": weights,
            "first_moment": xp.full_like(weights, 0.0),
            "second_moment": xp.full_like(weights, 0.0),
            "quality": xp.zeros(3, x),
        }

    def aggregate(self, x: Array, state: State, context: Context) -> Aggregation:
        part = CodedTensor(self, x, state, context)
        xp = backend_of(x)
        device = None if xp.traces else str(getattr(x, "device", None))
        kind = xp.dtype(x), device
        return (yield Joint(_aggregate_together, part, part.k, kind))

    def _aggregate_all(
        self, parts: Sequence[CodedTensor]
    ) -> Generator[Request, Any, list[Aggregated]]:
        """One autoencoder for all parts; its state is in one of them, or about to be made."""
        home = next((i for i, part in enumerate(parts) if part.state), 0)
        state = parts[home].state
        if sum(part.k for part in parts) < LEAST:
            results = yield from _aggregate_values(parts)
        else:
            state = state or self.common(parts[0].x)
            results, state = yield from self._train_or_code(parts, state)
        results[home] = results[home]._replace(state=state)
        return results

    def _train_or_code(
        self, parts: Sequence[CodedTensor], state: State
    ) -> Generator[Request, Any, tuple[list[Aggregated], State]]:
        x, context = parts[0].x, parts[0].context
        if not started(self.start, context.step, context.epoch):
            return (yield from self._train(parts, state))
        xp, weights = backend_of(x), state["autoencoder"]
        late = started(self.settled or False, context.step, context.epoch)
        if not late:
            weights = yield Sum(weights if context.rank == 0 else xp.full_like(weights, 0.0))
        results = yield from self._aggregate_coded(parts, weights)
        rest = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
        report = functools.partial(reported, context.name + rest, context.rank, late)
        (quality,) = xp.on_host(report, [state["quality"]], [(xp.dtype(x), 3)], x)
        return results, {**state, "autoencoder": weights, "quality": quality}

    @abc.abstractmethod
    def _aggregate_coded(
        self, parts: Sequence[CodedTensor], weights: Array
    ) -> Generator[Request, Any, list[Aggregated]]:
        """When training is over."""

    @abc.abstractmethod
    def _example(
        self, rows: np.ndarray, leader: int, counts: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return the inputs of the network, its targets and the innovations.

        They are made of all ranks' values (N, k); ``counts`` are the numbers of values of the
        tensors.
        """

    def _train(
        self, parts: Sequence[CodedTensor], state: State
    ) -> Generator[Request, Any, tuple[list[Aggregated], State]]:
        x, context, counts = parts[0].x, parts[0].context, [part.k for part in parts]
        xp, ranks, k = backend_of(x), context.size, sum(counts)
        dtype = np.dtype(xp.dtype(x))
        choice, _ = yield from selected(parts)
        size = coded_size(plain(), k, dtype)
        (frame,) = xp.on_host(encode_all, [choice.values], [("uint8", size)], x)
        frames = yield Gather(frame, equal_sizes=True)

        def prepare(step: Any, *frames: np.ndarray) -> list[np.ndarray]:
            rows = np.stack(
                [
                    decode_coded(plain(), frame, k, dtype, sender=f"rank {rank}")[1]
                    for rank, frame in enumerate(frames)
                ]
            )
            with np.errstate(invalid="ignore"):  # of a non-finite step
                values, wanted, innovations = self._example(rows, int(step) % ranks, counts)
                cosine = mean_cosine(rows)
            return [
                rows.sum(0) / dtype.type(ranks),
                values.reshape(-1),
                wanted.reshape(-1),
                np.zeros(0, dtype) if innovations is None else innovations.reshape(-1),
                np.array([cosine], dtype),
            ]

        innovates = self.innovation > 0
        outputs = (k, ranks * k, (ranks if innovates else 1) * k, ranks * k * innovates, 1)
        mean, values, wanted, innovations, cosine = xp.on_host(
            prepare, [context.step, *frames], [(dtype.name, size) for size in outputs], x
        )
        gradient, decoded = network_of(x).gradient(
            state["autoencoder"],
            xp.reshape(values, (ranks, k)),
            xp.reshape(innovations, (ranks, k)) if innovates else None,
            context.step % ranks,
        )
        error = xp.reshape(decoded, (-1,)) - wanted
        lost = product(xp, error, error) / (product(xp, wanted, wanted) + _TINY)
        state = self.after_step(xp, state, gradient, xp.concat([cosine, lost]))
        return choice.spread(mean, choice.values), state

    def after_step(self, xp: Any, state: State, gradient: Array, seen: Array) -> State:
        """One more step of Adam, unless it leads nowhere."""
        steps = state["quality"][2:] + 1
        first = _FIRST * state["first_moment"] + (1 - _FIRST) * gradient
        second = _SECOND * state["second_moment"] + (1 - _SECOND) * gradient * gradient
        size = self.rate * (1 - _SECOND**steps) ** 0.5 / (1 - _FIRST**steps)
        new = {
            "autoencoder": state["autoencoder"] - size * first / (second**0.5 + _EPSILON),
            "first_moment": first,
            "second_moment": second,
        }
        old = {key: state[key] for key in new}
        averages = _DECAY * state["quality"][:2] + (1 - _DECAY) * seen
        kept = xp.choose(xp.all_finite(new["autoencoder"]), lambda: new, lambda: old)
        return {**kept, "quality": xp.concat([averages, steps])}


def _aggregate_together(parts: list[CodedTensor]) -> Generator[Request, Any, list[Aggregated]]:
    """One exchange for all tensors that share an autoencoder.  Their order is that of their names,
    since an order of readiness may be another one after a checkpoint."""
    order = sorted(range(len(parts)), key=lambda i: natural(parts[i].context.name))
    first = parts[order[0]]
    for i in order:
        via = dataclasses.replace(parts[i].via, density=first.via.density)
        if via != first.via:
            raise ConfigError(
                f"{first.context.name} and {parts[i].context.name} share an autoencoder, and their "
                f"methods differ in more than the density: {first.via!r} and {parts[i].via!r}; "
                "give them the same options"
            )
    found = yield from first.via._aggregate_all([parts[i] for i in order])
    by_place = dict(zip(order, found, strict=True))
    return [by_place[i] for i in range(len(parts))]


def natural(name: str) -> tuple[str | int, ...]:
    """Return a key to sort names by, so that numbers in them count by their values.  Keras may call
    the layers of a model dense_9 and dense_10, and those of the next one dense and dense_1.

    >>> sorted(["dense_10/kernel", "dense_9/kernel"], key=natural)
    ['dense_9/kernel', 'dense_10/kernel']
    """
    parts = re.split(r"([0-9]+)", name)
    return tuple(int(part) if i % 2 else part for i, part in enumerate(parts))


def _aggregate_values(parts: Sequence[CodedTensor]) -> Generator[Request, Any, list[Aggregated]]:
    """Sum the selected values as they are."""
    choice, _ = yield from selected(parts)
    total = yield Sum(choice.values)
    return choice.spread(total / parts[0].context.size, choice.values)


def encode_all(values: np.ndarray) -> list[np.ndarray]:
    """Return a frame of flat values, in a list."""
    return [encode_coded(plain(), values, np.random.default_rng(0))]


def mean_cosine(rows: np.ndarray) -> float:
    """Return the mean cosine over the pairs of the rows (shape (N, k)); 1 if N = 1.  A row of zeros
    has cosine 0 with all others."""
    ranks = len(rows)
    if ranks == 1:
        return 1.0
    units = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), _TINY)
    total = float(np.square(units.sum(0)).sum() - np.square(units).sum())
    return total / (ranks * (ranks - 1))


def product(xp: Any, x: Array, y: Array) -> Array:
    return xp.reshape(xp.matmul(xp.reshape(x, (1, -1)), xp.reshape(y, (-1, 1))), (1,))


def reported(name: str, rank: int, late: bool, quality: np.ndarray) -> list[np.ndarray]:
    """Warn once if training went wrong, on rank 0; then the number of its steps is set to zero.
    ``late``: that should have happened before."""
    cosine, lost, steps = quality.tolist()
    if not steps:
        return [quality]
    seen = 1 - _DECAY**steps
    cosine, lost = cosine / seen, lost / seen
    problem = None
    if late:
        problem = (
            "all steps in which ranks should take over rank 0's autoencoder had a NaN or Inf, and "
            "their autoencoders may differ: go back to a checkpoint"
        )
    elif cosine < _ALIKE:
        problem = (
            f"the gradients of different ranks are hardly alike (mean cosine {cosine:.2f} over the "
            "selected elements), and one latent cannot stand for all: take larger batches, or DGC"
        )
    elif lost > _LOST:
        problem = (
            f"after {steps:.0f} steps of training the autoencoder still loses {lost:.0%} of what "
            "it is given: train it for longer, or take ScaleCom"
        )
    if problem and rank == 0:
        warnings.warn(f"learned compression of {name}: {problem}", PoorFit, stacklevel=2)
    return [quality * np.array([1, 1, 0], quality.dtype)]
