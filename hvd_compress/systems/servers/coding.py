"""Compression on the way to one receiver: each tensor is a message of its own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Compressor, Context, Sparse, State
from hvd_compress.errors import ConfigError, PayloadError, UnsupportedError
from hvd_compress.systems.base import Arrays
from hvd_compress.systems.servers.rules import Rules


class CodedMessage(NamedTuple):
    """Parts of a message, what the receiver reads from them, and the sender's new states."""

    parts: list[np.ndarray]
    values: Arrays
    states: dict[str, State]


@dataclasses.dataclass(frozen=True)
class LinkCoder:
    """Both ends of the way of one worker's gradients.

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
        self, arrays: Mapping[str, np.ndarray], states: Mapping[str, State], step: int, epoch: float
    ) -> CodedMessage:
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
            try:
                encoded = method.encode(x, state, self._context(name, step, epoch, norm))
            except UnsupportedError as error:
                raise _refused(method, str(error)) from None
            parts.append(encoded.message)
            values[name], after[name] = _dense(encoded.sent, x), encoded.state
        return CodedMessage(parts, values, after)

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
            if (part := next(parts, None)) is None:
                raise PayloadError(f"bad payload from {sender}, {name!r}: a part is missing")
            context = self._context(name, step, epoch, None)
            try:
                found[name] = self._method(name, shape).decode(part, shape, context)
            except PayloadError as error:
                text = str(error).replace(f"rank {context.rank}", f"{sender}, {name!r}", 1)
                raise PayloadError(text) from None
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


def coder_of(rules: Rules, worker: int, seed: int, momentum: float, nesterov: bool) -> LinkCoder:
    """Return the coder of the gradients of a worker."""
    # Workers draw different random numbers, which the server can draw again.
    own, method = seed * 2**20 + worker, rules.compression
    if not method.takes_momentum:
        return LinkCoder(method, own)
    return LinkCoder(method, own, momentum, nesterov)


def _dense(sent: np.ndarray | Sparse, like: np.ndarray) -> np.ndarray:
    xp = backend_of(like)
    if isinstance(sent, Sparse):
        sent = xp.put(np.zeros(like.size, sent.values.dtype), sent.indices, sent.values)
    return xp.restore(sent, like)


def _refused(method: Compressor, reason: str) -> ConfigError:
    return ConfigError(
        f"compression={method.name!r} cannot be sent to a server: {reason}; use a method whose "
        "messages stand alone, such as 'topk', 'dgc:small=sparse', 'efsignsgd' or 'fp16'"
    )
