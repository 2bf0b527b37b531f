"""Learned gradient compression on a parameter server (Abrahamyan et al., TNNLS 2021).

The server names one worker after the other the *common* one.  With v of all compressed tensors end
to end, s the largest value of the common worker in each tensor, and I the places where the k =
ceil(density * n) largest elements of each tensor are on the common worker::

    until `learn`       workers send v whole
    in each later step  every worker sends its innovation: its largest elements, of which there are
                        innovation * k, with their places; the common one also sends I
    until `code`        the server tells all workers I, they send v[I], and the server makes a step
                        of training: all are decoded from the common worker's latent
    from `code` on      the common worker also sends s and z = encode(v[I] / s); the server has
                        r_i = s decode_i(z, innovation_i / s) and tells worker i I and r_i, who
                        sends a number a_i for each tensor: that with which a_i r_i is nearest to
                        v[I]
    the gradient        is the mean of what worker i counts as sent: v[I], or a_i r_i, at I, and its
                        innovation where that is

The server trains, has a decoder for each worker, and sends the encoder to all workers when training
is over.  Tensors that LGC averages whole send their velocity.

Differs from the paper in: the common worker changes, or what is large on others only would never be
sent; workers train on values at the common places, which takes a second message, where those of the
paper send theirs at their own; innovations count exactly at their own places, and are not input of
the decoder alone; s and a_i.
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.aggregators._leader import no_values
from hvd_compress.aggregators._learning import Report, bounds, mean_cosine, natural
from hvd_compress.aggregators.learned import largest_of, learned_server, nearest
from hvd_compress.autoencoder import LEAST, first_weights, latent_size, numpy_network
from hvd_compress.autoencoder.layout import ENCODER, weights_of
from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Compressor, Context, Outcome, Sparse, State
from hvd_compress.chain import Aggregated, Aggregator, Chain, chain
from hvd_compress.codecs.frame import decode_coded, encode_coded
from hvd_compress.codecs.plain import plain
from hvd_compress.errors import ConfigError, PayloadError
from hvd_compress.methods import LGC
from hvd_compress.operators import top_k
from hvd_compress.operators.top_k import count
from hvd_compress.requests import Request, Sum
from hvd_compress.schedules import started
from hvd_compress.systems.servers.link import Link
from hvd_compress.systems.servers.messages import Kind, Message
from hvd_compress.systems.servers.pieces import Arrays
from hvd_compress.systems.servers.rules import Rules
from hvd_compress.systems.servers.server import Reply, Server

_FLOAT = np.dtype(np.float32)
_NONE = np.zeros(0, _FLOAT)
_NO_RANDOM = np.random.default_rng(0)
_ENCODER = weights_of(ENCODER)


def ends_of(rules: Rules, workers: int) -> tuple[type[Server], type[Link]]:
    """Return the classes of a server's and a worker's end, for so many workers.

    Raises:
        ConfigError: there are too few workers.
    """
    rules.check_workers(workers)
    if not isinstance(rules.compression, LGC):
        return Server, Link
    if workers < 2:
        raise ConfigError(
            "compression='lgc' on a parameter server lets one worker's latent stand for those of "
            f"others, and there is {workers} worker: start more ranks, or use "
            "compression='dgc:small=sparse'"
        )
    return LearnedServer, LearnedLink


class Phase(enum.IntEnum):
    """What workers send of compressed tensors, in the end."""

    WHOLE = 0
    VALUES = 1
    LATENT = 2


class Layout:
    """Which tensors are compressed, end to end in the order of their names, and how many elements
    of each are sent.

    Attributes:
        coded, whole: names of tensors.
        sizes, counts, innovations: numbers of elements, of common ones, and of those that each
            worker sends for itself, of each tensor in ``coded``.
    """

    def __init__(self, method: Compressor, arrays: Mapping[str, np.ndarray]) -> None:
        if not isinstance(method, LGC):
            raise ConfigError(f"only compression='lgc' has these ends of a server; got {method!r}")

        def is_coded(name: str) -> bool:
            x = arrays[name]
            return method.compresses(x.shape) and count(x.size, method.density) < x.size

        self.method = method
        self.coded = sorted(filter(is_coded, arrays), key=natural)
        self.whole = [name for name in arrays if name not in self.coded]
        self.sizes = [arrays[name].size for name in self.coded]
        self.counts = [count(n, method.density) for n in self.sizes]
        self.innovations = [count(k, method.innovation) for k in self.counts]
        self.n, self.k, self.m = map(sum, (self.sizes, self.counts, self.innovations))

    def phase(self, step: int) -> Phase:
        if not self.coded or not started(self.method.learn, step, None):
            return Phase.WHOLE
        if self.k < LEAST or not started(self.method.code, step, None):
            return Phase.VALUES
        return Phase.LATENT

    def largest(self, flat: np.ndarray, counts: list[int], step: int) -> np.ndarray:
        """Return the places of so many largest elements of each tensor."""
        select, context = top_k(1.0, self.method.selection), Context(step=step)
        found = [
            start + select.select(flat[start:stop], k, context)
            for (start, stop), k in zip(bounds(self.sizes), counts, strict=True)
        ]
        return np.concatenate(found)

    def each(self, numbers: np.ndarray) -> np.ndarray:
        """Return the number of each tensor for each of its common elements."""
        return np.repeat(numbers, self.counts)

    def check(self, places: np.ndarray, counts: list[int], sender: str) -> None:
        ends = [0, *itertools.accumulate(self.sizes)]
        if np.diff(np.searchsorted(places, ends)).tolist() != counts:
            raise PayloadError(
                f"bad payload from {sender}: it has not {counts} places in tensors of {self.sizes} "
                "elements: the ranks' models or options differ"
            )


class _to_server(Aggregator):
    """Hands over what would be averaged, and gets what was sent."""

    def aggregate(
        self, x: Array, state: State, context: Context
    ) -> Generator[Request, Any, Aggregated]:
        sent = yield Sum(x)
        return Aggregated(x, sent, True)


class LearnedLink(Link):
    """The worker's end.

    Attributes:
        phase: of the next gradient.
        common: the worker whose latent will stand for all.
        encoder: its weights.
    """

    def __init__(
        self, parameters: Mapping[str, np.ndarray], worker: int, rules: Rules, **options: Any
    ) -> None:
        super().__init__(parameters, worker, rules, **options)
        self.worker, self.common = worker, 0
        self._layout = Layout(rules.compression, self.parameters)
        self.phase = self._layout.phase(0)
        self.encoder: np.ndarray = first_weights(1, True)[:_ENCODER]
        self._exchanges: dict[str, Generator[Any, Any, Outcome]] = {}
        self._x: Arrays = {}
        self._flat = _NONE
        self._own = np.zeros(0, np.int64)

    @functools.cached_property
    def _chains(self) -> dict[tuple[bool, bool], Chain]:
        """By whether the tensor is compressed, and whether it is sent whole in this step."""
        method, via = self._layout.method, _to_server()
        whole = method.accumulated(masking=False)
        return {
            (True, False): chain(*method.accumulated(method.masking), via=via),
            (True, True): chain(*whole, via=via),
            (False, True): chain(*whole[:-1], via=via),
        }

    def push(
        self,
        gradients: Mapping[str, np.ndarray],
        rates: Sequence[float] = (),
        epoch: float | None = None,
    ) -> np.ndarray:
        """See :class:`Link`; tensors are coded together, so one without gradient sends zeros."""
        zeros = {n: np.zeros_like(x) for n, x in self.parameters.items() if n not in gradients}
        return super().push({**gradients, **zeros}, rates, epoch)

    def _encoded(self, gradients: Arrays, epoch: float) -> list[np.ndarray]:
        layout, step = self._layout, self._pushes
        self._exchanges, self._x = {}, {}
        for name, g in gradients.items():
            coded = name in layout.coded
            method = self._chains[coded, not coded or self.phase is Phase.WHOLE]
            state = self.states[name] if name in self.states else method.init(g)
            context = Context(
                name, step=step, momentum=self._up.momentum, nesterov=self._up.nesterov
            )
            self._exchanges[name] = exchange = method.exchange(g, state, context)
            self._x[name] = next(exchange).array  # type: ignore[attr-defined]
        self._pending = self.states  # if the server does not take the gradient
        with np.errstate(over="ignore"):
            flat = np.concatenate([*(self._x[n].astype(_FLOAT) for n in layout.coded), _NONE])
        if not all(np.isfinite(x).all() for x in (flat, *self._x.values())):
            return []
        if self.phase is Phase.WHOLE:
            self._settle({})
            return [_bytes(x) for x in self._x.values()]
        parts = [_bytes(self._x[name]) for name in layout.whole]
        own = layout.largest(flat, layout.innovations, step)
        parts.append(encode_coded(plain(), flat[own], _NO_RANDOM, own, layout.n, packed=True))
        self._flat, self._own = flat, own
        if self.worker == self.common:
            parts += self._common_parts(layout.largest(flat, layout.counts, step))
        return parts

    def _common_parts(self, places: np.ndarray) -> list[np.ndarray]:
        layout, values = self._layout, self._flat[places]
        none = np.zeros(layout.k, _FLOAT)
        parts = [encode_coded(no_values(), none, _NO_RANDOM, places, layout.n, packed=True)]
        if self.phase is Phase.LATENT:
            scales = largest_of(values, layout.counts)
            latent = numpy_network.encode(self.encoder, (values / layout.each(scales))[None])[0]
            parts.append(_bytes(np.concatenate([scales, latent])))
        return parts

    def _take(self, message: Message) -> bool:
        if message.kind is not Kind.ASK:
            return super()._take(message)
        layout = self._layout
        places = _places(message.parts[0], layout, self._server)
        values = self._flat[places]
        if self.phase is Phase.VALUES:
            answer, sent = values, values
        else:
            row = _floats(message.parts[1], layout.k, self._server)
            products = [
                np.sum(values[i:j] * row[i:j], dtype=float) for i, j in bounds(layout.counts)
            ]
            answer = nearest(np.array(products), row, layout.counts).astype(_FLOAT)
            sent = layout.each(answer) * row
        self.answer = self._sent(Message(Kind.ANSWER, parts=[_bytes(answer)]))
        dense = np.zeros(layout.n, _FLOAT)
        dense[places], dense[self._own] = sent, self._flat[self._own]
        everywhere = np.union1d(places, self._own)
        by_name = {}
        for name, (start, stop) in zip(layout.coded, bounds(layout.sizes), strict=True):
            first, last = np.searchsorted(everywhere, (start, stop))
            there = everywhere[first:last]
            x = self._x[name]
            by_name[name] = Sparse(there - start, dense[there].astype(x.dtype))
        self._settle(by_name)
        return False

    def _settle(self, sent: Mapping[str, Sparse]) -> None:
        """Take note of what was sent; of other tensors it is everything."""
        self._pending = {}
        for name, exchange in self._exchanges.items():
            try:
                exchange.send(sent.get(name, self._x[name]))
            except StopIteration as stop:
                self._pending[name] = stop.value.state

    def _told(self, parts: Iterator[np.ndarray]) -> float:
        epoch, phase, common, with_encoder = next(parts).view("<f8").tolist()
        self.phase, self.common = Phase(int(phase)), int(common)
        if with_encoder:
            self.encoder = _floats(next(parts), _ENCODER, self._server)
        return float(epoch)


class _Push(NamedTuple):
    """A message of a worker; places and numbers are the common one's, the latter s and z."""

    whole: Arrays
    innovation: tuple[np.ndarray, np.ndarray] | None = None
    choice: np.ndarray | None = None
    numbers: np.ndarray | None = None


class LearnedServer(Server):
    """The server's end.

    Attributes:
        common: the worker whose latent stands for all in this step.
        learned: weights, Adam's moments and the quality; see
            :class:`hvd_compress.aggregators.learned_server`.
    """

    def __init__(
        self,
        parameters: Mapping[str, np.ndarray],
        optimizer: Any,
        workers: Iterable[int],
        rules: Rules,
        **options: Any,
    ) -> None:
        super().__init__(parameters, optimizer, workers, rules, **options)
        self._layout = Layout(rules.compression, self.parameters)
        self._workers = sorted(self.active)
        method, decoders = self._layout.method, len(self._workers)
        self._via = learned_server(
            method.density, rate=method.rate, innovation=method.innovation, decoders=decoders
        )
        self.learned: State = self._via.untrained(_NONE)
        self.common = self._workers[0]
        self._has_encoder: set[int] = set()
        self._rows: dict[int, np.ndarray] = {}  # what workers were asked about, decoded
        self._owing: set[int] = set()
        self._answers: dict[int, np.ndarray] = {}
        self._where = np.zeros(0, np.int64)

    @property
    def phase(self) -> Phase:
        return self._layout.phase(self._version)

    # -- first half of a step -----------------------------------------------------------------

    def _decoded(
        self,
        worker: int,
        parts: Iterator[np.ndarray],
        names: Sequence[str],
        number: int,
        sender: str,
    ) -> _Push | None:
        layout, found = self._layout, list(parts)
        if worker not in self.active or self._base[worker] != self._version:
            return _Push({})  # of another step: not used
        if not found:
            return None
        is_whole = self.phase is Phase.WHOLE
        names = names if is_whole else layout.whole
        is_common = worker == self.common and not is_whole
        if len(found) != len(names) + (not is_whole) + is_common * (1 + self._codes):
            raise PayloadError(f"bad payload from {sender}: {len(found)} parts of a gradient")
        whole = {
            name: _array(part, self.parameters[name], sender)
            for name, part in zip(names, found, strict=False)
        }
        if is_whole:
            return _Push(whole)
        own, *rest = found[len(names) :]
        places, values = decode_coded(plain(), own, layout.m, _FLOAT, layout.n, sender=sender)
        assert places is not None
        layout.check(places, layout.innovations, sender)
        push = _Push(whole, (places, values))
        if is_common:
            push = push._replace(choice=rest[0])
            _places(rest[0], layout, sender)
        if is_common and self._codes:
            size = len(layout.counts) + latent_size(layout.k)
            push = push._replace(numbers=_floats(rest[1], size, sender))
        return push

    @property
    def _codes(self) -> bool:
        return self.phase is Phase.LATENT

    def _arrive(self, worker: int, gradients: Any, rates: list[float]) -> None:
        super()._arrive(worker, gradients, rates)
        if self._is_asking and worker in self._arrived:  # it was lost while others were asked
            self._arrived.pop(worker)
            self.stats.dropped[worker] += 1
            self.waiting[worker] = False

    @property
    def _is_asking(self) -> bool:
        return bool(self._owing or self._answers)

    def _due(self) -> list[Reply]:
        self._owing &= self._arrived.keys()
        self._answers = {w: own for w, own in self._answers.items() if w in self._arrived}
        if not self._is_asking and self.phase is not Phase.WHOLE and self._are_there():
            common = self._arrived.get(self.common, (None, []))[0]
            if common is not None:
                return self._asked(common)
            self._give_up_the_step()
        return super()._due()

    def _give_up_the_step(self) -> None:
        """Without the common worker nobody's gradient can be read."""
        for worker, (push, _) in self._arrived.items():
            self.stats.dropped[worker] += push is not None
            self.waiting[worker] = False
        self._arrived.clear()
        self._turn()
        self._version += 1

    def _are_there(self) -> bool:
        if self._is_asking:  # a worker that comes back now waits for the next step
            return not self._owing
        return super()._are_there()

    def _asked(self, common: _Push) -> list[Reply]:
        """Tell workers what the common one has chosen, and what they are taken to have there."""
        layout = self._layout
        assert common.choice is not None
        self._where = _places(common.choice, layout, f"worker {self.common}")
        replies = []
        for worker, (push, _) in sorted(self._arrived.items()):
            if push is None:
                continue
            parts = [common.choice]
            if common.numbers is not None:
                scales = layout.each(common.numbers[: len(layout.counts)])
                latent = common.numbers[None, len(layout.counts) :]
                innovation = (self._innovation(push) / scales)[None]
                decoder = self._workers.index(worker)
                weights = self.learned["autoencoder"]
                row = numpy_network.decode(weights, latent, layout.k, innovation, decoder)
                self._rows[worker] = row[0] * scales
                parts.append(_bytes(self._rows[worker]))
            self._owing.add(worker)
            del self.waiting[worker]
            replies.append(self._sent(worker, Message(Kind.ASK, parts=parts)))
        return replies

    def _innovation(self, push: _Push) -> np.ndarray:
        """Return a worker's innovation at the common places."""
        assert push.innovation is not None
        places, values = push.innovation
        dense = np.zeros(self._layout.n, _FLOAT)
        dense[places] = values
        return dense[self._where]

    # -- second half --------------------------------------------------------------------------

    def _take(self, worker: int, message: Message, sender: str) -> list[Reply]:
        if message.kind is not Kind.ANSWER:
            return super()._take(worker, message, sender)
        if worker not in self.active:
            return self._returned(worker)
        if worker not in self._owing or len(message.parts) != 1:
            raise PayloadError(f"bad payload from {sender}: an answer that nobody has asked for")
        layout = self._layout
        size = len(layout.counts) if self._codes else layout.k
        answer = _floats(message.parts[0], size, sender)
        if self._codes:
            answer = layout.each(answer) * self._rows[worker]
        self._answers[worker] = answer
        self._owing.discard(worker)
        self.waiting[worker] = True
        return self._due()

    def _step_together(self) -> None:
        layout = self._layout
        if self.phase is not Phase.WHOLE:
            if self.phase is Phase.VALUES:
                self._train()
            for worker, (push, rates) in self._arrived.items():
                if push is not None:
                    self._arrived[worker] = self._gradients(push, self._answers[worker]), rates
        else:
            for worker, (push, rates) in self._arrived.items():
                self._arrived[worker] = push and push.whole, rates
        self._answers, self._rows = {}, {}
        super()._step_together()
        self._turn()
        if self._codes and layout.phase(self._version - 1) is not Phase.LATENT:
            report = Report("the model", 0, False)
            (self.learned["quality"],) = report(self.learned["quality"])

    def _gradients(self, push: _Push, sent: np.ndarray) -> Arrays:
        """Return what one worker has sent, as a gradient."""
        assert push.innovation is not None
        flat = np.zeros(self._layout.n, _FLOAT)
        flat[self._where] = sent
        flat[push.innovation[0]] = push.innovation[1]
        found = dict(push.whole)
        for name, (i, j) in zip(self._layout.coded, bounds(self._layout.sizes), strict=True):
            x = self.parameters[name]
            found[name] = flat[i:j].reshape(x.shape).astype(x.dtype, copy=False)
        return found

    def _train(self) -> None:
        """Make a step of training, in steps to which all workers have come."""
        layout = self._layout
        if self._answers.keys() != set(self._workers) or layout.k < LEAST:
            return
        rows = np.stack([self._answers[w] for w in self._workers])
        leader = self._workers.index(self.common)
        scales = layout.each(largest_of(rows[leader], layout.counts))
        innovations = np.stack([self._innovation(self._arrived[w][0]) for w in self._workers])
        values, weights = rows / scales, self.learned["autoencoder"]
        gradient, decoded = numpy_network.gradient(weights, values, innovations / scales, leader)
        lost = np.square(decoded - values).sum() / max(np.square(values).sum(), 1e-30)
        seen = np.array([mean_cosine(rows), lost], _FLOAT)
        self.learned = self._via.after_step(backend_of(values), self.learned, gradient, seen)

    def _turn(self) -> None:
        """Let the next worker be the common one."""
        later = [w for w in sorted(self.active) if w > self.common]
        self.common = later[0] if later else min(self.active, default=self.common)

    def _orders(self, worker: int) -> list[np.ndarray]:
        news = self._codes and worker not in self._has_encoder
        head = np.array([self._epoch, self.phase, self.common, news])
        if not news:
            return [_bytes(head)]
        self._has_encoder.add(worker)
        return [_bytes(head), _bytes(self.learned["autoencoder"][:_ENCODER])]


def _bytes(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def _floats(part: np.ndarray, size: int, sender: str) -> np.ndarray:
    return _array(part, np.empty(size, _FLOAT), sender)


def _array(part: np.ndarray, like: np.ndarray, sender: str) -> np.ndarray:
    if part.nbytes != like.nbytes:
        raise PayloadError(
            f"bad payload from {sender}: {part.nbytes} bytes where {like.nbytes} were expected: "
            "the ranks' models or options differ"
        )
    return part.view(like.dtype).reshape(like.shape)


def _places(part: np.ndarray, layout: Layout, sender: str) -> np.ndarray:
    places, _ = decode_coded(no_values(), part, layout.k, _FLOAT, layout.n, sender=sender)
    assert places is not None
    layout.check(places, layout.counts, sender)
    return places
