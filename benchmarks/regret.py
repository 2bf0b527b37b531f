"""What the advisor's choices lose, over networks, models and times of backward.

    python benchmarks/regret.py --picture results/regret.png

In every cell the step of each method is computed from its measured pieces. The advisor chooses,
once knowing all exactly, and once with errors of 10 % in all it knows.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import numpy as np

from hvd_compress.advisor import KEPT, kept
from hvd_compress.cli.options import picture_file
from hvd_compress.studies.regret import cells

parser = argparse.ArgumentParser(
    description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
)
parser.add_argument("--error", type=float, nargs="+", default=[0.0, 0.1], help="of what it knows")
parser.add_argument("--worst", type=int, default=10, help="cells to print")
parser.add_argument("--picture", type=picture_file, help="draw the distribution of losses")
options = parser.parse_args()


def main() -> None:
    pieces = {model: kept(model) for model in KEPT}
    regrets = {}
    for error in options.error:
        found = list(cells(pieces, error=error))
        regrets[error] = np.sort([cell.regret for cell in found])
        behind = np.array([cell.behind for cell in found])
        print(f"\nerrors of {error:.0%}, {len(found)} cells: T(choice) / T(best)")
        print(
            f"mean {regrets[error].mean():.4f}, 95 % of the cells below "
            f"{np.quantile(regrets[error], 0.95):.3f}, largest {regrets[error].max():.3f}; "
            f"more than 2 % behind fp16 in {np.sum(behind > 1.02)} cells, by {behind.max():.3f} at "
            "most"
        )
        counts = Counter(cell.chosen for cell in found)
        print("chosen:", ", ".join(f"{name} {n}" for name, n in counts.most_common()))
        for cell in sorted(found, key=lambda cell: -cell.regret)[: options.worst]:
            network = cell.network
            print(
                f"  {cell.regret:.3f}  {cell.model}, {network.ranks} ranks, "
                f"{network.bandwidth / 1e9:g} Gbit/s, {1e6 * network.latency:g} us, "
                f"{1000 * cell.backward:g} ms: {cell.chosen} for {cell.best}"
            )
    if options.picture is not None:
        draw(regrets, options.picture)
        print(f"\npicture: {options.picture}")


def draw(regrets: dict[float, np.ndarray], picture: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for error, values in regrets.items():
        axes.plot(np.linspace(0, 100, len(values)), values, label=f"errors of {error:.0%}")
    axes.axhline(1.05, color="gray", linestyle=":")
    axes.set(xlabel="% of the cells", ylabel="T(choice) / T(best)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    main()
