"""The server's end of learned gradient compression on a parameter server; see :mod:`.learned`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hvd_compress.aggregators._learning import Report, bounds, mean_cosine
from hvd_compress.aggregators.learned import largest_of, learned_server
from hvd_compress.autoencoder import LEAST, latent_size, numpy_network
from hvd_compress.autoencoder.layout import ENCODER, weights_of
from hvd_compress.backends import backend_of
from hvd_compress.base import State
from hvd_compress.codecs.frame import decode_coded
from hvd_compress.codecs.plain import plain
from hvd_compress.errors import PayloadError
from hvd_compress.methods import LGC
from hvd_compress.systems.servers.learned import (
    FLOAT,
    Layout,
    Phase,
    floats,
    places_in,
)
from hvd_compress.systems.servers.pieces import Arrays, array_of, bytes_of

_ENCODER = weights_of(ENCODER)


class _Push(NamedTuple):
    """A message of a worker; places and numbers are the common one's, the latter s and z."""

    whole: Arrays
    innovation: tuple[np.ndarray, np.ndarray] | None = None
    choice: np.ndarray | None = None
    numbers: np.ndarray | None = None


class LearnedReader:
    """See :class:`.CodedReader`.

    Attributes:
        step: the number of steps of the server so far.
        common: the worker whose latent stands for all in this step.
        learned: weights, Adam's moments and the quality; see
            :class:`hvd_compress.aggregators.learned_server`.
    """

    def __init__(self, method: LGC, parameters: Arrays, workers: Collection[int]) -> None:
        self.step = 0
        self._layout, self._workers = Layout(method, parameters), sorted(workers)
        self._like = parameters
        self._via = learned_server(
            method.density,
            rate=method.rate,
            innovation=method.innovation,
            decoders=len(self._workers),
        )
        self.learned: State = self._via.untrained(np.zeros(0, FLOAT))
        self.common = self._workers[0]
        self._has_encoder: set[int] = set()
        self._rows: dict[int, np.ndarray] = {}  # what workers were asked about, decoded
        self._where = np.zeros(0, np.int64)

    @property
    def phase(self) -> Phase:
        return self._layout.phase(self.step)

    @property
    def _codes(self) -> bool:
        return self.phase is Phase.LATENT

    # -- first half of a step -----------------------------------------------------------------

    def decode(
        self, worker: int, parts: Iterator[np.ndarray], like: Arrays, step: int, epoch: float
    ) -> _Push | None:
        layout, found, sender = self._layout, list(parts), f"worker {worker}"
        if not found:
            return None
        is_whole = self.phase is Phase.WHOLE
        names = list(like) if is_whole else layout.whole
        is_common = worker == self.common and not is_whole
        if len(found) != len(names) + (not is_whole) + is_common * (1 + self._codes):
            raise PayloadError(f"bad payload from {sender}: {len(found)} parts of a gradient")
        whole = {
            name: array_of(part, like[name], sender)
            for name, part in zip(names, found, strict=False)
        }
        if is_whole:
            return _Push(whole)
        own, *rest = found[len(names) :]
        places, values = decode_coded(plain(), own, layout.m, FLOAT, layout.n, sender=sender)
        assert places is not None
        layout.check(places, layout.innovations, sender)
        push = _Push(whole, (places, values))
        if is_common:
            push = push._replace(choice=rest[0])
            places_in(rest[0], layout, sender)
        if is_common and self._codes:
            size = len(layout.counts) + latent_size(layout.k)
            push = push._replace(numbers=floats(rest[1], size, sender))
        return push

    def questions(self, arrived: Mapping[int, _Push]) -> dict[int, list[np.ndarray]] | None:
        """Tell workers what the common one has chosen, and what they are taken to have there;
        without it nobody's gradient can be read."""
        if self.phase is Phase.WHOLE:
            return {}
        common = arrived.get(self.common)
        if common is None:
            return None
        layout = self._layout
        assert common.choice is not None
        self._where = places_in(common.choice, layout, f"worker {self.common}")
        found = {}
        for worker, push in arrived.items():
            found[worker] = [common.choice]
            if common.numbers is not None:
                scales = layout.each(common.numbers[: len(layout.counts)])
                latent = common.numbers[None, len(layout.counts) :]
                innovation = (self._innovation(push) / scales)[None]
                decoder = self._workers.index(worker)
                weights = self.learned["autoencoder"]
                row = numpy_network.decode(weights, latent, layout.k, innovation, decoder)
                self._rows[worker] = row[0] * scales
                found[worker].append(bytes_of(self._rows[worker]))
        return found

    def _innovation(self, push: _Push) -> np.ndarray:
        """Return a worker's innovation at the common places."""
        assert push.innovation is not None
        places, values = push.innovation
        dense = np.zeros(self._layout.n, FLOAT)
        dense[places] = values
        return dense[self._where]

    # -- second half --------------------------------------------------------------------------

    def answered(self, worker: int, parts: Sequence[np.ndarray]) -> np.ndarray:
        layout, sender = self._layout, f"worker {worker}"
        if len(parts) != 1:
            raise PayloadError(f"bad payload from {sender}: {len(parts)} parts of an answer")
        answer = floats(parts[0], len(layout.counts) if self._codes else layout.k, sender)
        return layout.each(answer) * self._rows[worker] if self._codes else answer

    def gradients(
        self, arrived: Mapping[int, _Push], answers: Mapping[int, np.ndarray]
    ) -> Mapping[int, Arrays]:
        if self.phase is Phase.WHOLE:
            return {worker: push.whole for worker, push in arrived.items()}
        if self.phase is Phase.VALUES:
            self._train(arrived, answers)
        return {w: self._gradients(push, answers[w]) for w, push in arrived.items()}

    def _gradients(self, push: _Push, sent: np.ndarray) -> Arrays:
        """Return what one worker has sent, as a gradient."""
        assert push.innovation is not None
        flat = np.zeros(self._layout.n, FLOAT)
        flat[self._where] = sent
        flat[push.innovation[0]] = push.innovation[1]
        found = dict(push.whole)
        for name, (i, j) in zip(self._layout.coded, bounds(self._layout.sizes), strict=True):
            x = self._like[name]
            found[name] = flat[i:j].reshape(x.shape).astype(x.dtype, copy=False)
        return found

    def _train(self, arrived: Mapping[int, _Push], answers: Mapping[int, np.ndarray]) -> None:
        """Make a step of training, in steps to which all workers have come."""
        layout = self._layout
        if answers.keys() != set(self._workers) or layout.k < LEAST:
            return
        rows = np.stack([answers[w] for w in self._workers])
        leader = self._workers.index(self.common)
        scales = layout.each(largest_of(rows[leader], layout.counts))
        innovations = np.stack([self._innovation(arrived[w]) for w in self._workers])
        values, weights = rows / scales, self.learned["autoencoder"]
        gradient, decoded = numpy_network.gradient(weights, values, innovations / scales, leader)
        lost = np.square(decoded - values).sum() / max(np.square(values).sum(), 1e-30)
        seen = np.array([mean_cosine(rows), lost], FLOAT)
        self.learned = self._via.after_step(backend_of(values), self.learned, gradient, seen)

    def turn(self, active: Collection[int]) -> None:
        """Let the next worker be the common one."""
        later = [w for w in sorted(active) if w > self.common]
        self.common = later[0] if later else min(active, default=self.common)
        self._rows, before = {}, self.phase
        self.step += 1
        if self._codes and before is not Phase.LATENT:
            (self.learned["quality"],) = Report("the model", 0, False)(self.learned["quality"])

    def orders(self, worker: int) -> tuple[list[float], list[np.ndarray]]:
        news = self._codes and worker not in self._has_encoder
        if news:
            self._has_encoder.add(worker)
        encoder = [bytes_of(self.learned["autoencoder"][:_ENCODER])] if news else []
        return [self.phase, self.common, news], encoder
