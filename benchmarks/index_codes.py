"""How many bits the index of a selected element takes, by the code and by where indices are.

    python benchmarks/index_codes.py

Sizes are those of whole codes, divided by the number of indices; a gap is the number of places
between two indices.  "uniform": places drawn from all; "runs": runs of 32 neighbours, at
multiples of 32; "rows": all of a few rows of 512, as where units of a layer are dead; "network":
the largest elements of a gradient of the 1024 x 1024 weights between two layers of a network at
its beginning, for 16 of scikit-learn's digits.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from sklearn.datasets import load_digits

from hvd_compress.cli.options import parser_of
from hvd_compress.wire.indices import best_parameter, gaps_of

DENSITIES = (1e-4, 1e-3, 1e-2, 0.1, 0.5)


def drawn(kind: str, n: int, density: float, random: np.random.Generator) -> np.ndarray:
    run = {"uniform": 1, "runs": 32, "rows": 512}[kind]
    starts = random.choice(n // run, max(1, int(density * n / run)), replace=False)
    return np.sort((starts[:, None] * run + np.arange(run)).reshape(-1))


def bits_of(gaps: np.ndarray, n: int) -> dict[str, float]:
    """The bits of each code, by its name."""
    k = gaps.size
    length = np.frexp((gaps + 1).astype(np.float64))[1].astype(np.int64)  # of gap + 1, in bits
    nested = np.frexp(length.astype(np.float64))[1].astype(np.int64)
    low = max(0, int(np.log2(n / k)))
    last = int(gaps.sum()) + k - 1
    found = best_parameter(gaps, n)
    assert found is not None
    return {
        "int32": 32 * k,
        "bitmap": n,
        "Elias-Fano": k * (low + 1) + (last >> low),
        "Elias gamma": int((2 * length - 1).sum()),
        "Elias delta": int((length - 1 + 2 * nested - 1).sum()),
        "Rice": rice_bits(gaps, n),
        "sent": 8 * found[1],
    }


def rice_bits(gaps: np.ndarray, n: int) -> int:
    k = gaps.size
    return min(k * (b + 1) + int((gaps >> b).sum()) for b in range(n.bit_length()))


def cases(n: int) -> Iterator[tuple[str, np.ndarray, int]]:
    random = np.random.default_rng(0)
    for kind in ("uniform", "runs", "rows"):
        for density in DENSITIES:
            yield f"{kind}, {density:g}", drawn(kind, n, density, random), n
    size = np.abs(gradient())
    for density in DENSITIES:
        largest = np.argsort(-size, kind="stable")[: int(density * size.size)]
        yield f"network, {density:g}", np.sort(largest), size.size


def gradient(width: int = 1024) -> np.ndarray:
    """Of the mean loss, flat; by hand, so that it needs no framework."""
    x, y = load_digits(return_X_y=True)
    random = np.random.default_rng(0)
    chosen = random.choice(len(x), 16, replace=False)
    x, y = x[chosen] / 8 - 1, y[chosen]
    first, middle, last = (
        np.sqrt(2 / rows) * random.standard_normal((rows, columns))
        for rows, columns in ((64, width), (width, width), (width, 10))
    )
    a = np.maximum(x @ first, 0)
    b = np.maximum(a @ middle, 0)
    z = np.exp(b @ last - (b @ last).max(axis=1, keepdims=True))
    error = z / z.sum(axis=1, keepdims=True) - np.eye(10)[y]
    return (a.T @ (error @ last.T * (b > 0))).reshape(-1)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--elements", type=int, default=2**22)
    heading = None
    for label, indices, n in cases(parser.parse_args().elements):
        found = bits_of(gaps_of(indices, "int64"), n)
        if heading is None:
            heading = list(found)
            print(f"| indices, density | {' | '.join(heading)} |")
            print("|---|" + "---|" * len(heading))
        print(
            f"| {label} | " + " | ".join(f"{found[c] / indices.size:.2f}" for c in heading) + " |"
        )


if __name__ == "__main__":
    main()
