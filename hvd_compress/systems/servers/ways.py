"""The way of gradients to a server: which strategies both ends take.

A *sender* says what a worker's message carries, and a *reader* what the server makes of the
messages of a step.  Most compressions have :class:`.CodedSender` and :class:`.CodedReader`, where
the methods of both are described; ``LGC`` has its own, whose server asks workers for more before it
steps.
"""

from __future__ import annotations

from collections.abc import Mapping

from hvd_compress.methods import LGC
from hvd_compress.systems.servers.coding import CodedReader, CodedSender, Coder
from hvd_compress.systems.servers.learned_reader import LearnedReader
from hvd_compress.systems.servers.learned_sender import LearnedSender
from hvd_compress.systems.servers.pieces import Arrays
from hvd_compress.systems.servers.rules import Rules


def coders(
    rules: Rules, worker: int, seed: int, momentum: float, nesterov: bool
) -> tuple[Coder, Coder]:
    """Return the coders of the ways from a worker and to it."""
    # Workers draw different random numbers, which the server can draw again.
    own = seed * 2**20 + worker
    up, down = (
        Coder(method, own, *((momentum, nesterov) if method.takes_momentum else ()))
        for method in (rules.compression, rules.compression_down)
    )
    return up, down


def sender_of(
    rules: Rules, parameters: Arrays, worker: int, up: Coder
) -> CodedSender | LearnedSender:
    """Return a worker's end of the way to a server with these pieces."""
    if isinstance(rules.compression, LGC):
        return LearnedSender(rules.compression, parameters, worker, up)
    return CodedSender(up)


def reader_of(
    rules: Rules, parameters: Arrays, up: Mapping[int, Coder]
) -> CodedReader | LearnedReader:
    """Return a server's end, for workers with these coders."""
    if isinstance(rules.compression, LGC):
        return LearnedReader(rules.compression, parameters, up)
    return CodedReader(up)
