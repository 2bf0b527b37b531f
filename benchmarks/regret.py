"""The loss of the advisor's choices, over networks, models and times of backward.

    python benchmarks/regret.py

In every cell the step of each method is computed from its measured pieces.  The advisor chooses,
once knowing all exactly, and once with errors of 10 % in all it knows: rates, latencies and the
methods' work, each off by a random factor.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from hvd_compress.advisor import CANDIDATES, MODELS, Network, Piece, average_step, choose, kept
from hvd_compress.cli.options import parser_of

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
    pieces: Mapping[str, Mapping[str, Piece]], error: float = 0.0, seed: int = 0
) -> Iterator[Cell]:
    """Yield every cell of the grid for each model.

    Args:
        pieces: by model and method.
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
        among = [candidate for candidate in CANDIDATES if candidate.method in own]
        chosen = choose(known, seen, off(backward), among).row
        seconds = {c.row: average_step(c, own, network, backward).whole for c in among}
        best = min(seconds, key=seconds.__getitem__)
        regret, behind = seconds[chosen] / seconds[best], seconds[chosen] / seconds["fp16"]
        yield Cell(model, network, backward, chosen, best, regret, behind)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--error", type=float, nargs="+", default=[0.0, 0.1], help="of all it knows"
    )
    parser.add_argument("--worst", type=int, default=10, help="cells to print")
    options = parser.parse_args()
    pieces = {model: kept(model) for model in MODELS}
    for error in options.error:
        found = sorted(cells(pieces, error=error), key=lambda cell: -cell.regret)
        regrets, behind = (np.array([getattr(c, x) for c in found]) for x in ("regret", "behind"))
        print(f"\nerrors of {error:.0%}, {len(found)} cells: T(choice) / T(best)")
        print(f"mean {regrets.mean():.4f}, 95 % of the cells below", end=" ")
        print(
            f"{np.quantile(regrets, 0.95):.3f}, largest {regrets.max():.3f}; more than 2 %", end=" "
        )
        print(f"behind fp16 in {np.sum(behind > 1.02)} cells, by {behind.max():.3f} at most")
        for cell in found[: options.worst]:
            network = cell.network
            print(
                f"  {cell.regret:.3f}  {cell.model}, {network.ranks} ranks, "
                f"{network.bandwidth / 1e9:g} Gbit/s, {1e6 * network.latency:g} us, "
                f"{1000 * cell.backward:g} ms: {cell.chosen} for {cell.best}"
            )


if __name__ == "__main__":
    main()
