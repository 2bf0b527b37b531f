"""The worker's end of learned gradient compression on a parameter server; see :mod:`.learned`."""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hvd_compress.aggregators._leader import no_values
from hvd_compress.aggregators._learning import bounds
from hvd_compress.aggregators.learned import largest_of, nearest
from hvd_compress.autoencoder import first_weights, numpy_network
from hvd_compress.autoencoder.layout import ENCODER, weights_of
from hvd_compress.base import Array, Context, Outcome, Sparse, State
from hvd_compress.chain import Aggregated, Aggregator, Chain, chain
from hvd_compress.codecs.frame import encode_coded
from hvd_compress.codecs.plain import plain
from hvd_compress.methods import LGC
from hvd_compress.requests import Request, Sum
from hvd_compress.systems.servers.coding import Coder
from hvd_compress.systems.servers.learned import FLOAT, Layout, Phase, floats, places_in
from hvd_compress.systems.servers.pieces import Arrays, bytes_of

_NONE = np.zeros(0, FLOAT)
_NO_RANDOM = np.random.default_rng(0)
_ENCODER = weights_of(ENCODER)


class _to_server(Aggregator):
    """Hands over what would be averaged, and gets what was sent."""

    def aggregate(
        self, x: Array, state: State, context: Context
    ) -> Generator[Request, Any, Aggregated]:
        sent = yield Sum(x)
        return Aggregated(x, sent, True)


class LearnedSender:
    """See :class:`.CodedSender`.

    Attributes:
        phase: of the next gradient.
        common: the worker whose latent will stand for all.
        encoder: its weights.
    """

    needs_all = True  # tensors are coded together

    def __init__(self, method: LGC, parameters: Arrays, worker: int, up: Coder) -> None:
        self.worker, self.common, self._up = worker, 0, up
        self._layout = Layout(method, parameters)
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

    def encode(
        self, gradients: Arrays, states: Mapping[str, State], step: int, epoch: float
    ) -> tuple[list[np.ndarray], dict[str, State]]:
        layout = self._layout
        self._exchanges, self._x = {}, {}
        for name, g in gradients.items():
            coded = name in layout.coded
            method = self._chains[coded, not coded or self.phase is Phase.WHOLE]
            state = states[name] if name in states else method.init(g)
            context = Context(
                name, step=step, momentum=self._up.momentum, nesterov=self._up.nesterov
            )
            self._exchanges[name] = exchange = method.exchange(g, state, context)
            self._x[name] = next(exchange).array  # type: ignore[attr-defined]
        with np.errstate(over="ignore"):
            flat = np.concatenate([*(self._x[n].astype(FLOAT) for n in layout.coded), _NONE])
        if not all(np.isfinite(x).all() for x in (flat, *self._x.values())):
            return [], dict(states)
        if self.phase is Phase.WHOLE:
            return [bytes_of(x) for x in self._x.values()], self._settled({})
        parts = [bytes_of(self._x[name]) for name in layout.whole]
        own = layout.largest(flat, layout.innovations, step)
        parts.append(encode_coded(plain(), flat[own], _NO_RANDOM, own, layout.n, packed=True))
        self._flat, self._own = flat, own
        if self.worker == self.common:
            parts += self._common_parts(layout.largest(flat, layout.counts, step))
        return parts, dict(states)  # which are those after an answer

    def _common_parts(self, places: np.ndarray) -> list[np.ndarray]:
        layout, values = self._layout, self._flat[places]
        none = np.zeros(layout.k, FLOAT)
        parts = [encode_coded(no_values(), none, _NO_RANDOM, places, layout.n, packed=True)]
        if self.phase is Phase.LATENT:
            scales = largest_of(values, layout.counts)
            latent = numpy_network.encode(self.encoder, (values / layout.each(scales))[None])[0]
            parts.append(bytes_of(np.concatenate([scales, latent])))
        return parts

    def answer(
        self, question: Sequence[np.ndarray], server: str
    ) -> tuple[list[np.ndarray], dict[str, State]]:
        layout = self._layout
        places = places_in(question[0], layout, server)
        values = self._flat[places]
        if self.phase is Phase.VALUES:
            answer, sent = values, values
        else:
            row = floats(question[1], layout.k, server)
            products = [
                np.sum(values[i:j] * row[i:j], dtype=float) for i, j in bounds(layout.counts)
            ]
            answer = nearest(np.array(products), row, layout.counts).astype(FLOAT)
            sent = layout.each(answer) * row
        dense = np.zeros(layout.n, FLOAT)
        dense[places], dense[self._own] = sent, self._flat[self._own]
        everywhere = np.union1d(places, self._own)
        by_name = {}
        for name, (start, stop) in zip(layout.coded, bounds(layout.sizes), strict=True):
            first, last = np.searchsorted(everywhere, (start, stop))
            there = everywhere[first:last]
            x = self._x[name]
            by_name[name] = Sparse(there - start, dense[there].astype(x.dtype))
        return [bytes_of(answer)], self._settled(by_name)

    def _settled(self, sent: Mapping[str, Sparse]) -> dict[str, State]:
        """Return the states after what was sent; of other tensors it is everything."""
        states = {}
        for name, exchange in self._exchanges.items():
            try:
                exchange.send(sent.get(name, self._x[name]))
            except StopIteration as stop:
                states[name] = stop.value.state
        return states

    def told(self, orders: Sequence[float], parts: Iterator[np.ndarray], server: str) -> None:
        phase, common, with_encoder = orders
        self.phase, self.common = Phase(int(phase)), int(common)
        if with_encoder:
            self.encoder = floats(next(parts), _ENCODER, server)
