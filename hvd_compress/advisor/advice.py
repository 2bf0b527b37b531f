"""The time of a step with each method, and the choice between them.

On a processor the method's work and backward share the cores, and only messages travel meanwhile.
Gradients leave in k buckets.  Computation and messages are two stages of a pipeline: bucket i + 1
is computed while bucket i travels.  The last one is read at the end.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from hvd_compress.advisor.losses import RECIPES, MeasuredLoss, loss_of
from hvd_compress.advisor.network import Network
from hvd_compress.advisor.pieces import Piece


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A method to choose from.

    Attributes:
        row: what the tables of :mod:`hvd_compress.advisor.losses` call it.
        write: what users write, given ``{first}``, a number of steps; empty if it is
            ``compression="row"``.
        first: the part of the steps that sends everything, or counts as if it did.

    >>> [candidate.method for candidate in CANDIDATES if candidate.first]
    ['dgc:density=0.001', 'dgc:compact', 'onebit_adam']
    """

    row: str
    write: str = ""
    first: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether averages lose nothing but rounding to 16 bits."""
        return self.row in ("none", "fp16")

    @property
    def method(self) -> str:
        """The method after the first steps."""
        return self.row.partition(",")[0]

    def written(self, steps: int) -> str:
        """Return what users write, given the number of steps of the training."""
        text = self.write or f'compression="{self.row}"'
        return text.format(first=round(self.first * steps))

    def loss(self, optimizer: str, steps: int) -> MeasuredLoss | None:
        """Return what it was seen to lose; see :func:`hvd_compress.advisor.losses.loss_of`.  Both
        ways to round to 16 bits count where one of them was trained."""
        found = loss_of(self.row, optimizer, steps)
        return loss_of("bf16", optimizer, steps) if self.row == "fp16" and not found else found

    def is_within(self, optimizer: str, steps: int, tolerance: float | None = None) -> bool:
        """Return whether it was trained with the optimizer, and lost no more than the tolerance."""
        if self.row == "none":
            return True
        loss = self.loss(optimizer, steps)
        return loss is not None and loss.within(tolerance)


_ONE_BIT = "compression=adam.compressor() of adam = hvd.OneBitAdam(..., freeze_step={first})"
CANDIDATES = (
    Candidate("none"),
    Candidate("fp16"),
    Candidate("linear"),
    Candidate("topk:density=0.01"),
    Candidate("powersgd:rank=2"),
    Candidate("powersgd:rank=4"),
    Candidate(
        "dgc:density=0.001, warm-up",
        "compression=hvd.DGC(density=hvd.warmup_to(0.001, steps={first}))",
        0.25,
    ),
    Candidate(
        "dgc:compact, warm-up",
        "compression=hvd.DGC.compact(density=hvd.warmup_to(0.001, steps={first}))",
        0.25,
    ),
    Candidate("onebit_adam", _ONE_BIT, 0.2),
    Candidate("onebit"),
    Candidate("fp8"),
    Candidate("qsgd"),
)
#: what a method must gain to be preferred to one that rounds to 16 bits at most
_MARGIN = 0.02


@dataclasses.dataclass(frozen=True)
class Step:
    """The seconds of a step.

    Attributes:
        whole: from the start of backward to the last average.
        processor: of the method's own work in it.
        wire: of its messages, hidden by backward or not.

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
        backward: seconds of computing gradients, which hide messages.
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


def average_step(
    candidate: Candidate, pieces: Mapping[str, Piece], network: Network, backward: float = 0.0
) -> Step:
    """Return the time of a step with one candidate, its dense ones at the start included.

    Args:
        candidate: its method, and "none" if it has a start, are among the pieces.
        pieces: by method.
        network, backward: as for :func:`step_of`.
    """
    own = step_of(pieces[candidate.method], network, backward)
    if not candidate.first:
        return own
    dense = step_of(pieces["none"], network, backward)
    pairs = zip(dataclasses.astuple(dense), dataclasses.astuple(own), strict=True)
    return Step(*(candidate.first * a + (1 - candidate.first) * b for a, b in pairs))


def allowed(optimizer: str, steps: int, tolerance: float | None = None) -> tuple[Candidate, ...]:
    """Return the candidates that lose no more than the tolerance in the training of the nearest
    length.

    Args:
        optimizer: one of ``OPTIMIZERS``.
        steps: of the training.
        tolerance: in the units of the recipes; ``None``: theirs.

    >>> [candidate.row for candidate in allowed("sgd", steps=10_000)][:2]
    ['none', 'fp16']
    """
    return tuple(c for c in CANDIDATES if c.is_within(optimizer, steps, tolerance))


def choose(
    pieces: Mapping[str, Piece],
    network: Network,
    backward: float = 0.0,
    among: Iterable[Candidate] = CANDIDATES,
) -> Candidate:
    """Return the candidate of the shortest step.

    For candidates that lose nothing that is the shortest time to the loss.  One that does more than
    round to 16 bits must gain 2 %.

    Args:
        pieces: by method; others are not chosen.
        network: where messages travel.
        backward: seconds of computing gradients.
        among: the candidates.

    >>> network = Network(ranks=8, bandwidth=1e9)
    >>> choose(kept("resnet50"), network, backward=0.5, among=allowed("adamw", 1000)).method
    'linear'
    """
    seconds = {
        candidate: average_step(candidate, pieces, network, backward).whole
        for candidate in among
        if candidate.method in pieces
    }

    def penalised(candidate: Candidate) -> float:
        return seconds[candidate] / (1 if candidate.is_exact else 1 - _MARGIN)

    return min(seconds, key=penalised)


def break_even(
    piece: Piece, against: Piece, network: Network, backward: float = 0.0
) -> float | None:
    """Return the bandwidth in bit/s below which a method is faster than another one.

    It is looked for from 1 Mbit/s to 1 Tbit/s; infinity: always faster; ``None``: never.

    Args:
        piece: of the method.
        against: of the other one.
        network: all of it but its ``bandwidth``.
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
    pieces: Mapping[str, Piece],
    network: Network,
    backward: float,
    optimizer: str,
    steps: int,
) -> list[dict[str, Any]]:
    """Return the rows of a table of candidates, the shortest step first.

    A row has the seconds of the whole step, of the processor and of messages, and the bytes of a
    rank after the first steps.  Then it has the :func:`break_even` against fp16 in bit/s, the
    measured loss with its unit, recipe and length, and what to write.

    Args:
        pieces: by method, "fp16" and "none" among them; candidates without a piece have no row.
        network, backward: as for :func:`step_of`.
        optimizer, steps: of the training.
    """
    base = pieces["fp16"]
    rows = []
    for candidate in CANDIDATES:
        if (piece := pieces.get(candidate.method)) is None:
            continue
        step = average_step(candidate, pieces, network, backward)
        even = None
        if piece.nbytes(network.ranks) < base.nbytes(network.ranks):
            even = break_even(piece, base, network, backward)
        loss = candidate.loss(optimizer, steps)
        diverges = loss is not None and math.isinf(loss.lost)
        rows.append(
            {
                "method": candidate.row,
                "write": candidate.written(steps),
                "seconds": step.whole,
                "processor": step.processor,
                "wire": step.wire,
                "bytes": round(piece.nbytes(network.ranks)),
                "break_even": even,
                "lost": None if loss is None else "diverges" if diverges else loss.lost,
                "unit": None if loss is None else RECIPES[loss.recipe].unit,
                "recipe": None if loss is None else loss.recipe,
                "recipe_steps": None if loss is None else loss.steps,
                "seeds": None if loss is None else loss.seeds,
            }
        )
    return sorted(rows, key=lambda row: row["seconds"])
