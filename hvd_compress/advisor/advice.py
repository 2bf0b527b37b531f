"""The time of a step with each method, and the choice between them.

On a processor the method's work and backward share the cores, and only messages travel meanwhile.
Gradients leave in k buckets: what a rank computes and what travels are two stages of a pipeline, in
which bucket i + 1 is computed while bucket i travels, and what comes last is read at the end.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from hvd_compress.advisor.network import Network
from hvd_compress.advisor.pieces import Piece
from hvd_compress.config import check_choice

#: what averages lose: nothing but rounding to 16 bits; what comparisons with dense training did not
#: see, under SGD or AdamW; nothing in the long run, since what is not sent is kept and sent later;
#: what rounding to few bits loses
ACCURACIES = ("exact", "measured", "feedback", "lossy")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A method to choose from.

    Attributes:
        method: as users write it, such as "topk:density=0.01".
        accuracy: what it does to averages, one of ``ACCURACIES``: "exact", but for rounding to 16
            bits; "measured", no loss was seen with SGD nor with AdamW; "feedback", what is not sent
            is kept and sent later; "lossy".
        lost_sgd: points of accuracy lost on MNIST under SGD, where that was measured; DGC with its
            warm-up (docs/accuracy.md).
        lost_adamw: per cent of perplexity lost by a transformer under AdamW, where that was
            measured.

    >>> Candidate("powersgd:rank=4", "feedback", lost_adamw=9.8) in CANDIDATES
    True
    """

    method: str
    accuracy: str
    lost_sgd: float | None = None
    lost_adamw: float | None = None


CANDIDATES = (
    Candidate("none", "exact"),
    Candidate("fp16", "exact"),
    Candidate("linear", "measured", 0.0, 0.1),
    Candidate("topk:density=0.01", "feedback", 0.07, 53.4),
    Candidate("dgc:density=0.001", "feedback", 0.22),
    Candidate("dgc:compact", "feedback", 0.25),
    Candidate("powersgd:rank=2", "feedback", 0.03),
    Candidate("powersgd:rank=4", "feedback", lost_adamw=9.8),
    Candidate("efsignsgd", "feedback"),
    Candidate("onebit", "feedback"),
    Candidate("fp8", "feedback"),
    Candidate("qsgd", "lossy"),
)
#: what a method must gain to be preferred to one that loses less
_MARGIN = 0.02


@dataclasses.dataclass(frozen=True)
class Step:
    """The seconds of a step.

    Attributes:
        whole: from the start of backward to the last average.
        processor: of the method's own work in it.
        wire: of its messages, hidden behind backward or not.

    >>> step = step_of(kept("resnet50")["fp16"], Network(ranks=4, bandwidth=1e9), backward=0.5)
    >>> round(step.wire, 3), step.whole > 0.5  # not all of it is hidden
    (0.614, True)
    """

    whole: float
    processor: float
    wire: float


def step_of(piece: Piece, network: Network, backward: float = 0.0) -> Step:
    """Return the time of a step with one method.

    Args:
        piece: what the method costs by itself.
        network: where messages travel.
        backward: seconds of computing gradients, behind which messages are hidden.
    """
    p = network.ranks
    wire = sum(
        network.seconds(kind, m.nbytes(p), m.exchanges) for kind, m in piece.messages.items()
    )
    if p == 1:
        return Step(backward, 0.0, 0.0)
    k, first = piece.buckets, backward + piece.before
    last = piece.after + p * piece.each
    # The first bucket is computed, the longer stage follows for the others, and the last travels.
    whole = first / k + max(first, wire) * (k - 1) / k + wire / k + last
    return Step(whole, piece.processor(p), wire)


def allowed(accuracy: str) -> tuple[Candidate, ...]:
    """Return the candidates that lose no more than ``accuracy`` says.

    Raises:
        ConfigError: it is none of ``ACCURACIES``.
    """
    check_choice("accuracy", accuracy, ACCURACIES)
    most = ACCURACIES.index(accuracy)
    return tuple(c for c in CANDIDATES if ACCURACIES.index(c.accuracy) <= most)


def choose(
    pieces: Mapping[str, Piece],
    network: Network,
    backward: float = 0.0,
    accuracy: str = "measured",
) -> str:
    """Return the method of the shortest step; one that loses more must gain 2 %.

    Args:
        pieces: by method; others are not chosen.
        network: where messages travel.
        backward: seconds of computing gradients.
        accuracy: the most that may be lost.

    Raises:
        ConfigError: ``accuracy`` is none of ``ACCURACIES``.

    >>> choose(kept("resnet50"), Network(ranks=8, bandwidth=1e9), backward=0.5, accuracy="exact")
    'fp16'
    """
    seconds = seconds_of(pieces, network, backward)
    best, least, loses = "", math.inf, ""
    for candidate in allowed(accuracy):
        if candidate.method not in seconds:
            continue
        worse = bool(best) and candidate.accuracy != loses
        if seconds[candidate.method] < least * (1 - _MARGIN * worse):
            best, least = candidate.method, seconds[candidate.method]
            loses = candidate.accuracy
    return best


def seconds_of(
    pieces: Mapping[str, Piece], network: Network, backward: float = 0.0
) -> dict[str, float]:
    """Return the seconds of a step by method; see :func:`step_of` for ``network`` and ``backward``.
    ``pieces`` are by method, too."""
    return {method: step_of(piece, network, backward).whole for method, piece in pieces.items()}


def break_even(
    piece: Piece, against: Piece, network: Network, backward: float = 0.0
) -> float | None:
    """Return the bandwidth in bit/s below which a method is faster than another one; infinity if it
    always is, ``None`` if it never is, from 1 Mbit/s to 1 Tbit/s.

    Args:
        piece: of the method.
        against: of the other one.
        network: whose ``bandwidth`` is not looked at.
        backward: seconds of computing gradients.
    """

    def gains(bandwidth: float) -> bool:
        there = dataclasses.replace(network, bandwidth=bandwidth)
        own, other = step_of(piece, there, backward), step_of(against, there, backward)
        return own.whole < other.whole

    low, high = 1e6, 1e12
    if gains(high):
        return math.inf
    if not gains(low):
        return None
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gains(middle) else (low, middle)
    return low


def is_bottleneck(pieces: Mapping[str, Piece], network: Network, backward: float) -> bool:
    """Return whether more than a twentieth of a step in fp16 is time that messages cost.

    Args:
        pieces: by method, "fp16" among them.
        network, backward: as for :func:`step_of`.
    """
    step = step_of(pieces["fp16"], network, backward)
    alone = backward + step.processor
    return step.whole - alone > 0.05 * step.whole


def rows_of(
    pieces: Mapping[str, Piece], network: Network, backward: float, methods: Iterable[Candidate]
) -> list[dict[str, Any]]:
    """Return what a table says of each method, the shortest step first: seconds of the whole step,
    of the processor and of messages, the bytes of a rank, the :func:`break_even` against fp16
    in bit/s, and what it loses (:class:`Candidate`).

    Args:
        pieces: by method, "fp16" and those of ``methods`` among them.
        network, backward: as for :func:`step_of`.
        methods: the rows.
    """
    base = pieces["fp16"]
    rows = []
    for candidate in methods:
        piece = pieces[candidate.method]
        step = step_of(piece, network, backward)
        even = None
        if piece.nbytes(network.ranks) < base.nbytes(network.ranks):
            even = break_even(piece, base, network, backward)
        rows.append(
            {
                **dataclasses.asdict(candidate),
                "seconds": step.whole,
                "processor": step.processor,
                "wire": step.wire,
                "bytes": round(piece.nbytes(network.ranks)),
                "break_even": even,
            }
        )
    return sorted(rows, key=lambda row: row["seconds"])
