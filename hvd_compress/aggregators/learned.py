"""Selected elements as the latent of an autoencoder that the ranks have trained on them."""

from __future__ import annotations

import abc
import dataclasses
import math
import warnings
from collections.abc import Generator
from typing import Any, ClassVar

import numpy as np

from hvd_compress.aggregators._leader import leaders_choice
from hvd_compress.autoencoder import (
    LEAST,
    first_weights,
    latent_size,
    network_of,
    numpy_network,
)
from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, Gather, Request, Sparse, State, Sum
from hvd_compress.chain import Aggregated, Aggregator
from hvd_compress.codecs.frame import coded_size, decode_coded, encode_coded
from hvd_compress.codecs.plain import plain
from hvd_compress.config import check_fraction, converted, is_whole
from hvd_compress.errors import ConfigError, PoorFit
from hvd_compress.operators import top_k
from hvd_compress.operators.top_k import count
from hvd_compress.schedules import After, Start, as_start, started
from hvd_compress.wire import decode_sparse, encode_sparse, sparse_size

#: of Adam: how its two moments decay, and what keeps its quotient finite
_FIRST, _SECOND, _EPSILON = 0.9, 0.999, 1e-8
#: of the averages in "quality"
_DECAY = 0.9
#: ranks below this cosine are not alike; decoding that loses more than this is of no use
_ALIKE, _LOST = 0.05, 0.95
#: avoids 0 / 0
_TINY = 1e-30


def settled_after(settled: Start | None, start: Start) -> Start:
    """Return ``settled``, or else a schedule that begins a little later than ``start``: by more
    than one step, since a non-finite step is undone."""
    if settled is not None:
        return as_start(settled)
    if isinstance(start, After):
        more = 3 if start.unit == "step" else 1
        return After(start.unit, start.stage_length + more)
    return After("step", 3) if start else start


@dataclasses.dataclass(frozen=True)
class _Learned(Aggregator):
    """A leader, who changes with every step, chooses the k = ceil(density * n) elements that are
    largest on it, and all ranks take theirs at the same places.  Until ``start``, a number of steps
    or ``After("epoch", ...)``, every rank sends its values to all, and all ranks make the same
    step of Adam on them; from then on, only latents are sent.

    State, equal on all ranks: ``autoencoder``, the weights; ``first_moment`` and ``second_moment``,
    Adam's; ``quality``: averages of the mean cosine between the values of two ranks and of the
    share of the energy that decoding loses, and the number of training steps so far.

    What frameworks compute may differ between ranks in its last bits, and so may the weights after
    training.  So all ranks take over those of rank 0 when it ends, in the first steps that code, or
    epochs, until ``settled``; and they decode in NumPy, on the host.

    Warns with :class:`~hvd_compress.PoorFit`, on rank 0, when training is over and has not helped.
    """

    density: float = 0.001
    start: Start = dataclasses.field(default=300, metadata=converted(as_start))
    rate: float = 0.003
    selection: str = "sampled"
    settled: Start | None = dataclasses.field(
        default=None, metadata=converted(settled_after, "start")
    )

    keys = ("autoencoder", "first_moment", "second_moment", "quality")
    per_rank = False
    decoders: ClassVar[int] = 1
    innovation: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction("density", self.density)
        check_fraction("rate", self.rate)
        assert self._select  # checks the other options

    @property
    def _select(self) -> top_k:
        return top_k(self.density, self.selection)

    def fits(self, n: int) -> bool:
        """Return whether enough of ``n`` elements are selected for the autoencoder, and not all."""
        return LEAST <= count(n, self.density) < n

    def init(self, x: Array, shape: tuple[int, ...]) -> State:
        xp = backend_of(x)
        n = math.prod(shape)
        if not self.fits(n):
            raise ConfigError(
                f"density={self.density} takes {count(n, self.density)} of {n} elements, and the "
                f"autoencoder needs from {LEAST} to {n - 1}: leader_top_k() for this tensor"
            )
        first = xp.from_numpy(first_weights(self.decoders, self.innovation > 0), x)
        weights = xp.cast(first, xp.dtype(x))
        return {
            "autoencoder": weights,
            "first_moment": xp.full_like(weights, 0.0),
            "second_moment": xp.full_like(weights, 0.0),
            "quality": xp.zeros(3, x),
        }

    def aggregate(
        self, x: Array, state: State, context: Context
    ) -> Generator[Request, Any, Aggregated]:
        if not started(self.start, context.step, context.epoch):
            return (yield from self._train(x, state, context))
        xp, weights = backend_of(x), state["autoencoder"]
        late = started(self.settled, context.step, context.epoch)  # type: ignore[arg-type]
        if not late:
            weights = yield Sum(weights if context.rank == 0 else xp.full_like(weights, 0.0))
        aggregated = yield from self._aggregate_coded(x, weights, context)
        report = _Report(context.name, context.rank, late and self.settled != self.start)
        (quality,) = xp.on_host(report, [state["quality"]], [(xp.dtype(x), 3)], x)
        return aggregated._replace(state={**state, "autoencoder": weights, "quality": quality})

    @abc.abstractmethod
    def _aggregate_coded(
        self, x: Array, weights: Array, context: Context
    ) -> Generator[Request, Any, Aggregated]:
        """When training is over; the state of ``Aggregated`` is not looked at."""

    @abc.abstractmethod
    def _example(
        self, rows: np.ndarray, leader: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """From all ranks' values (N, k): what enters the network, what should leave it, and the
        innovations."""

    def _train(
        self, x: Array, state: State, context: Context
    ) -> Generator[Request, Any, Aggregated]:
        xp = backend_of(x)
        n, ranks = xp.size(x), context.size
        k, dtype = count(n, self.density), np.dtype(xp.dtype(x))
        indices, _ = yield from leaders_choice(self._select, x, k, context)
        own = xp.take(x, indices)
        (frame,) = xp.on_host(_encode_all, [own], [("uint8", coded_size(plain(), k, dtype))], x)
        frames = yield Gather(frame, equal_sizes=True)

        def prepare(step: Any, *frames: np.ndarray) -> list[np.ndarray]:
            rows = np.stack(
                [
                    decode_coded(plain(), frame, k, dtype, sender=f"rank {rank}")[1]
                    for rank, frame in enumerate(frames)
                ]
            )
            with np.errstate(invalid="ignore"):  # of a non-finite step
                values, wanted, innovations = self._example(rows, int(step) % ranks)
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
        lost = _product(xp, error, error) / (_product(xp, wanted, wanted) + _TINY)
        return Aggregated(
            xp.put(xp.zeros(n, x), indices, mean),
            Sparse(indices, own),
            xp.all_finite(mean),
            self._after_step(xp, state, gradient, xp.concat([cosine, lost])),
        )

    def _after_step(self, xp: Any, state: State, gradient: Array, seen: Array) -> State:
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


@dataclasses.dataclass(frozen=True)
class learned_allreduce(_Learned, name="learned_allreduce"):
    """Latents are summed, and every rank decodes their mean::

        z = sum over the ranks of encode(values / s) / N;   mean = a decode(z)

    where s is the largest magnitude among the leader's values, which is sent with the indices, and
    a takes the result as near to the mean of the values as it gets, which takes a sum of one number
    from each rank.  Every rank counts as having sent the common result.

    Options: see :class:`learned_server`.

    Reference: the ring-allreduce instance of Abrahamyan, Chen, Bekoulis and Deligiannis, IEEE
    TNNLS 2021.  Differs from it in: the leader's scale, and a, without which an error could be
    larger than what went in and training diverge.
    """

    def _example(
        self, rows: np.ndarray, leader: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        values = rows / largest(rows[leader])
        return values, values.mean(0), None

    def _aggregate_coded(
        self, x: Array, weights: Array, context: Context
    ) -> Generator[Request, Any, Aggregated]:
        xp = backend_of(x)
        n, k, dtype = xp.size(x), count(xp.size(x), self.density), xp.dtype(x)

        def scale_of(indices: Array) -> Array:
            return xp.on_host(_largest, [xp.take(x, indices)], [(dtype, 1)], x)[0]

        def decode(weights: np.ndarray, total: np.ndarray) -> list[np.ndarray]:
            latent = total.reshape(1, -1) / total.dtype.type(context.size)
            return [numpy_network.decode(weights, latent, k, None)[0]]

        def fit(decoded: np.ndarray, product: np.ndarray, scale: np.ndarray) -> list[np.ndarray]:
            with np.errstate(invalid="ignore"):  # of a non-finite step
                factor = nearest(product / context.size, decoded) * scale
            return [decoded * factor.astype(decoded.dtype)]

        indices, scale = yield from leaders_choice(self._select, x, k, context, scale_of, 1)
        values = xp.take(x, indices) / scale
        latent = network_of(x).encode(weights, xp.reshape(values, (1, k)))
        total = yield Sum(xp.reshape(latent, (-1,)))
        (decoded,) = xp.on_host(decode, [weights, total], [(dtype, k)], x)
        product = yield Sum(_product(xp, values, decoded))
        (result,) = xp.on_host(fit, [decoded, product, scale], [(dtype, k)], x)
        mean = xp.put(xp.zeros(n, x), indices, result)
        return Aggregated(mean, Sparse(indices, result), xp.all_finite(result))


@dataclasses.dataclass(frozen=True)
class learned_server(_Learned, name="learned_server"):
    """One latent stands for all ranks, and each adds its largest values, its innovation::

        z = encode(values / s) on the leader;   mean = sum of a_i decode_i(z, innovation_i) / N

    where the values and innovations of each rank are divided by the largest magnitude among them,
    and a_i, which is sent with the innovation, takes the result as near to the values of rank i as
    it gets.

    Options:
        density: fraction of elements to select.
        start: the steps or epochs of training.
        rate: Adam's learning rate.
        selection: "sampled" or "exact"; the same elements, found in two ways.
        settled: when all ranks have the weights of rank 0; ``None``: three steps, or an epoch,
            after ``start``.
        innovation: fraction of the selected values that every rank sends beside the latent.
        decoders: rank i decodes by decoder i modulo their number; with as many as there are ranks
            each has its own, as in the paper.

    Reference: the parameter-server instance of Abrahamyan et al., TNNLS 2021.  Differs from it in:
    there is no server, everybody gets what it would get, and decodes; the leader changes; a_i.
    """

    innovation: float = 0.01  # type: ignore[misc]
    decoders: int = 1  # type: ignore[misc]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction("innovation", self.innovation)
        decoders = self.decoders
        if not is_whole(decoders) or decoders < 1:
            raise ConfigError(f"decoders must be a number, 1 or more; got {decoders!r}")

    def _example(
        self, rows: np.ndarray, leader: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        values = np.stack([row / largest(row) for row in rows])
        innovations = np.zeros_like(values)
        for own, row in zip(innovations, values, strict=True):
            places = self._places(row)
            own[places] = row[places]
        return values, values, innovations

    def _places(self, values: np.ndarray) -> np.ndarray:
        m = count(values.size, self.innovation)
        return np.sort(np.argsort(-np.abs(values), kind="stable")[:m])

    def _aggregate_coded(
        self, x: Array, weights: Array, context: Context
    ) -> Generator[Request, Any, Aggregated]:
        xp = backend_of(x)
        n, ranks, dtype = xp.size(x), context.size, xp.dtype(x)
        k = count(n, self.density)
        m = count(k, self.innovation)
        size, one = sparse_size(m, k, dtype), coded_size(plain(), 1, np.dtype(dtype))

        def latent_of(indices: Array) -> Array:
            values = xp.take(x, indices)
            (scale,) = xp.on_host(_largest, [values], [(dtype, 1)], x)
            rows = xp.reshape(values / scale, (1, k))
            return xp.reshape(network_of(x).encode(weights, rows), (-1,))

        def encode(weights: np.ndarray, latent: np.ndarray, values: np.ndarray) -> list[np.ndarray]:
            places = self._places(values)
            with np.errstate(invalid="ignore"):  # of a non-finite step
                own = values[places] / largest(values)
                innovation = _spread(places, own, k)[None]
                row = numpy_network.decode(weights, latent[None], k, innovation, context.rank)[0]
                factor = nearest(np.sum(values * row, dtype=np.float64), row)
            frames = encode_sparse(places, own, k), _encode_all(factor[None].astype(dtype))[0]
            return [np.concatenate(frames)]

        def decode(
            weights: np.ndarray, latent: np.ndarray, *frames: np.ndarray
        ) -> list[np.ndarray]:
            innovations, factors = [], []
            for rank, frame in enumerate(frames):
                sender = f"rank {rank}"
                places, own = decode_sparse(frame[:size], k, dtype, m, sender=sender)
                innovations.append(_spread(places, own, k))
                code = frame[size:]
                factors.append(decode_coded(plain(), code, 1, np.dtype(dtype), sender=sender)[1])
            with np.errstate(invalid="ignore"):
                latents = np.repeat(latent[None], ranks, 0)
                rows = numpy_network.decode(weights, latents, k, np.stack(innovations))
                rows *= np.stack(factors)
                return [rows.sum(0) / rows.dtype.type(ranks), rows[context.rank]]

        indices, latent = yield from leaders_choice(
            self._select, x, k, context, latent_of, latent_size(k)
        )
        own = [weights, latent, xp.take(x, indices)]
        (frame,) = xp.on_host(encode, own, [("uint8", size + one)], x)
        frames = yield Gather(frame, equal_sizes=True)
        mean, sent = xp.on_host(decode, [weights, latent, *frames], [(dtype, k), (dtype, k)], x)
        return Aggregated(
            xp.put(xp.zeros(n, x), indices, mean), Sparse(indices, sent), xp.all_finite(mean)
        )


def largest(values: np.ndarray) -> np.floating:
    """Return the largest magnitude; 1 if all are zero, NaN if one is."""
    found = np.abs(values).max()
    return found if found != 0 else values.dtype.type(1)


def _largest(values: np.ndarray) -> list[np.ndarray]:
    return [np.array([largest(values)], values.dtype)]


def _encode_all(values: np.ndarray) -> list[np.ndarray]:
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


def _product(xp: Any, x: Array, y: Array) -> Array:
    """The scalar product, an array of one element."""
    return xp.reshape(xp.matmul(xp.reshape(x, (1, -1)), xp.reshape(y, (-1, 1))), (1,))


def nearest(product: Any, decoded: np.ndarray) -> Any:
    """Return the factor a that makes |values - a decoded| least, given the scalar product of the
    two."""
    return product / (np.sum(np.square(decoded, dtype=np.float64)) + _TINY)


def _spread(places: np.ndarray, values: np.ndarray, k: int) -> np.ndarray:
    dense = np.zeros(k, values.dtype)
    dense[places] = values
    return dense


class _Report:
    """What training came to, once; then the number of its steps is set to zero.  ``late``: that
    should have happened before."""

    def __init__(self, name: str, rank: int, late: bool) -> None:
        self.name, self.rank, self.late = name, rank, late

    def __call__(self, quality: np.ndarray) -> list[np.ndarray]:
        cosine, lost, steps = quality.tolist()
        if not steps:
            return [quality]
        seen = 1 - _DECAY**steps
        cosine, lost = cosine / seen, lost / seen
        problem = None
        if self.late:
            problem = (
                "all steps in which ranks should take over rank 0's autoencoder had a NaN "
                "or Inf, and their autoencoders may differ: let there be more of them, settled="
            )
        elif cosine < _ALIKE:
            problem = (
                f"the gradients of different ranks are hardly alike (mean cosine {cosine:.2f} over "
                "the selected elements), and one latent cannot stand for all: take larger batches, "
                "or DGC"
            )
        elif lost > _LOST:
            problem = (
                f"after {steps:.0f} steps of training the autoencoder still loses {lost:.0%} of "
                "what it is given: train it for longer, or take ScaleCom"
            )
        if problem and self.rank == 0:
            warnings.warn(f"learned compression of {self.name}: {problem}", PoorFit, stacklevel=2)
        return [quality * np.array([1, 1, 0], quality.dtype)]
