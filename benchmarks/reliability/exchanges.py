"""An exchange of two tensors between three ranks in one process, of which a message is damaged."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.reliability.damage import CHANGED_NOTHING, NOTICED, UNCHANGED, spoil
from benchmarks.reliability.frames import ROWS, contexts, every
from hvd_compress.base import Sparse
from hvd_compress.engines.lockstep import World, replies_to, run
from hvd_compress.errors import PayloadError

SIZE = 3
#: rows, columns: small ones have paths of their own
SHAPES = {"w": (20, 35), "b": (11,)}


class _DamagedWorld(World):
    """Steps in which one array of bytes in one rank's replies is spoiled: the ``at``-th of all."""

    def step(self, seed: int, at: int | None, draw: random.Random, **context: Any) -> list[Any]:
        """Return what each rank has in the end: numbers of means, directions and states."""
        random_numbers = np.random.default_rng(seed)
        gradients: list[dict[str, np.ndarray]] = [
            {
                name: random_numbers.standard_normal(s).astype(np.float32)
                for name, s in SHAPES.items()
            }
            for _ in range(self.size)
        ]
        for name, shape in SHAPES.items():
            method = self.compressor.for_tensor(name, shape)
            self.states[name] = [method.init(own[name]) for own in gradients]
        self.count, self.changed = 0, False

        def answers(requests: Sequence[Any]) -> list[Any]:
            replies = []
            for reply in replies_to(requests):
                parts = list(reply) if isinstance(reply, list | tuple) else [reply]
                for i, part in enumerate(parts):
                    if not isinstance(part, np.ndarray) or part.dtype != np.uint8:
                        continue
                    if self.count == at:
                        parts[i] = spoil(part, _others(), draw)
                        self.changed = parts[i].tobytes() != part.tobytes()
                    self.count += 1
                replies.append(parts if isinstance(reply, list | tuple) else parts[0])
            return replies

        outcomes = run([self._joined(r, own, context) for r, own in enumerate(gradients)], answers)
        return [_bits(x) for own in outcomes for name in SHAPES for x in _arrays(own[name])]


@functools.cache
def _others() -> list[np.ndarray]:
    """Return frames whose parts are mixed with those of a message: none that would pass for it."""
    return [frame.frame for frame in every(1)]


def _arrays(outcome: Any) -> list[Any]:
    states = [value for _, value in sorted(outcome.state.items())]
    return [outcome.mean, outcome.direction, *states]


def _bits(x: Any) -> bytes:
    if isinstance(x, Sparse):
        return x.indices.tobytes() + x.values.tobytes()
    return np.asarray(x).tobytes()


def _world(name: str, fused: bool) -> _DamagedWorld:
    world = _DamagedWorld(ROWS[name].method, SIZE, fused=fused)
    world.epoch = 3
    return world


@functools.cache
def _clean(name: str, fused: bool) -> tuple[int, list[bytes]]:
    """Return how many messages there are in a step, and what comes of it."""
    world = _world(name, fused)
    found = world.step(0, None, random.Random(0), **contexts(name))
    return world.count, found


@functools.cache
def names() -> list[str]:
    """Return the methods that send bytes."""
    return [name for name in ROWS if _clean(name, False)[0]]


class Case:
    """One case: a method, by its blocks or fused, and which message is damaged."""

    def __init__(self, name: str, draw: random.Random) -> None:
        self.name, self.draw, self.fused = name, draw, draw.random() < 0.6
        self.kind = name.split("-")[0]
        self.at = draw.randrange(_clean(name, self.fused)[0])

    def __str__(self) -> str:
        return f"{self.name}, {'fused' if self.fused else 'blocks'}, message {self.at}"

    def outcome(self) -> str:
        """Return a word of the campaign; raise whatever else comes out."""
        world = _world(self.name, self.fused)
        try:
            found = world.step(0, self.at, self.draw, **contexts(self.name))
        except PayloadError:
            return NOTICED
        if not world.changed:
            return UNCHANGED
        if found != _clean(self.name, self.fused)[1]:
            raise AssertionError("damage was not noticed")
        return CHANGED_NOTHING
