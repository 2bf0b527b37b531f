"""Compression on the way to one receiver, by the methods that are made for collectives.

A sender runs the exchange of each tensor as if it were the only rank, and keeps what it would have
handed to the collectives.  That is the message.  The receiver runs the same exchange with zeros in
place of the gradient and the message in place of the collectives' replies: what comes out is the
average over one rank, bit for bit that of the sender.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.base import Compressor, Context, Outcome, State
from hvd_compress.engines.base import alone
from hvd_compress.engines.lockstep import reply_to
from hvd_compress.errors import ConfigError, PayloadError
from hvd_compress.systems.servers.pieces import Arrays


class Encoded(NamedTuple):
    """Parts of a message, what the receiver reads from them, and the sender's new states."""

    parts: list[np.ndarray]
    values: Arrays
    states: dict[str, State]


@dataclasses.dataclass(frozen=True)
class Coder:
    """Both ends of one way, of one worker.

    Args:
        method: the compression.
        seed: of random numbers that both ends share.
        momentum, nesterov: those of the optimizer, for methods that take momentum over.
    """

    method: Compressor
    seed: int = 0
    momentum: float = 0.0
    nesterov: bool = False

    def encode(
        self, arrays: Mapping[str, np.ndarray], states: dict[str, State], step: int, epoch: float
    ) -> Encoded:
        """Compress arrays by name; ``states`` lacks those of tensors that were never sent."""
        parts: list[np.ndarray] = []
        values, after = {}, {}
        norm = None
        if self.method.needs_gradient_norm:
            norm = math.sqrt(sum(float(np.sum(np.square(x, dtype=float))) for x in arrays.values()))
        for name, x in arrays.items():
            if not x.size:
                values[name] = x
                continue
            method = self._method(name, x)
            state = states.get(name)
            state = method.init(x) if state is None else state
            exchange = method.exchange(x, state, self._context(name, step, epoch, norm))
            before = len(parts)
            outcome = _kept(method, exchange, parts)
            if len(parts) == before:
                raise _refused(method, "a single rank sends nothing")
            values[name], after[name] = outcome.mean, outcome.state
        return Encoded(parts, values, after)

    def decode(
        self,
        parts: Iterator[np.ndarray],
        like: Mapping[str, np.ndarray],
        step: int,
        epoch: float,
        sender: str,
    ) -> Arrays:
        """Return arrays of the shapes and dtypes of ``like`` from the parts of a message.

        Raises:
            PayloadError: the parts are not what the method would have sent.
        """
        found = {}
        for name, shape in like.items():
            if not shape.size:
                found[name] = shape
                continue
            method, zeros = self._method(name, shape), np.zeros_like(shape)
            context = self._context(name, step, epoch, 1.0)
            exchange = method.exchange(zeros, method.init(zeros), context)
            found[name] = _replayed(exchange, parts, f"{sender}, {name!r}").mean
        if next(parts, None) is not None:
            raise PayloadError(f"bad payload from {sender}: parts that belong to no parameter")
        return found

    def _method(self, name: str, x: np.ndarray) -> Compressor:
        method = self.method.for_tensor(name, x.shape)
        if method.common(x):
            raise _refused(method, "its tensors share a state")
        return method

    def _context(self, name: str, step: int, epoch: float, norm: float | None) -> Context:
        return Context(
            name,
            step=step,
            epoch=None if math.isnan(epoch) else epoch,
            seed=self.seed,
            momentum=self.momentum,
            nesterov=self.nesterov,
            gradient_norm=norm,
        )


def _refused(method: Compressor, reason: str) -> ConfigError:
    return ConfigError(
        f"compression={method.name!r} cannot be sent to a server: {reason}; use a method whose "
        "messages stand alone, such as 'topk', 'dgc:small=sparse', 'efsignsgd:via=allgather' or "
        "'fp16'"
    )


def _kept(
    method: Compressor, exchange: Generator[Any, Any, Outcome], parts: list[np.ndarray]
) -> Outcome:
    """Run an exchange of a single rank, and append what it hands over."""
    exchange, reply = alone(exchange), None
    while True:
        try:
            request = exchange.send(reply)
        except StopIteration as stop:
            outcome: Outcome = stop.value
            if outcome.update is not None:
                raise _refused(method, "the server would have to keep its momentum") from None
            return outcome
        part = request.to_bytes()
        if part is None:
            raise _refused(method, f"it needs a collective ({type(request).__name__})")
        parts.append(part)
        reply = reply_to([request])


def _replayed(
    exchange: Generator[Any, Any, Outcome], parts: Iterator[np.ndarray], sender: str
) -> Outcome:
    """Run an exchange with what another one has handed over."""
    exchange, reply = alone(exchange), None
    while True:
        try:
            request = exchange.send(reply)
        except StopIteration as stop:
            outcome: Outcome = stop.value
            return outcome
        part = next(parts, None)
        if part is None:
            raise PayloadError(f"bad payload from {sender}: a part is missing")
        try:
            reply = request.from_bytes(part)
        except PayloadError as error:
            raise PayloadError(f"bad payload from {sender}: {error}") from None
