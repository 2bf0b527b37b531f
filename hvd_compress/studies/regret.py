"""How much a choice of the advisor loses: T(its choice) / T(the best), over many networks.

In the cells of a grid each method's step is computed from measured pieces
(:mod:`hvd_compress.advisor`).  The advisor chooses from what it knows, which may be wrong: rates,
latencies and the methods' work as they are, or each off by a random factor.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from hvd_compress.advisor import Network, Piece, choose, seconds_of

#: bit/s, seconds, ranks, and seconds of backward
BANDWIDTHS = (1e8, 1e9, 1e10, 1e11)
LATENCIES = (25e-6, 500e-6, 10e-3)
RANKS = (2, 8, 64)
BACKWARDS = (0.0, 0.03, 0.1, 0.3)


class Cell(NamedTuple):
    """A choice, what it takes, and what others take.

    Attributes:
        model, network, backward: where it was made.
        chosen, best: methods.
        regret: the time of the chosen one over that of the best.
        behind: the time of the chosen one over that of fp16.
    """

    model: str
    network: Network
    backward: float
    chosen: str
    best: str
    regret: float
    behind: float


def cells(
    pieces: Mapping[str, Mapping[str, Piece]],
    accuracy: str = "lossy",
    error: float = 0.0,
    seed: int = 0,
) -> Iterator[Cell]:
    """Yield every cell of the grid for each model.

    Args:
        pieces: by model and method.
        accuracy: see :func:`hvd_compress.advisor.choose`.
        error: of all that the advisor knows: a standard deviation of 0.1 is about 10 %.
        seed: of these errors.
    """
    random = np.random.default_rng(seed)

    def off(value: float) -> float:
        return value * float(np.exp(error * random.standard_normal()))

    grid = itertools.product(pieces, BANDWIDTHS, LATENCIES, RANKS, BACKWARDS)
    for model, bandwidth, latency, ranks, backward in grid:
        network, own = Network(ranks, bandwidth, latency), pieces[model]
        seen = Network(ranks, off(bandwidth), off(latency))
        known = {
            method: dataclasses.replace(
                piece, before=off(piece.before), after=off(piece.after), each=off(piece.each)
            )
            for method, piece in own.items()
        }
        chosen = choose(known, seen, off(backward), accuracy)
        seconds = seconds_of(own, network, backward)
        best = min(seconds, key=lambda method: seconds[method])
        regret, behind = seconds[chosen] / seconds[best], seconds[chosen] / seconds["fp16"]
        yield Cell(model, network, backward, chosen, best, regret, behind)
