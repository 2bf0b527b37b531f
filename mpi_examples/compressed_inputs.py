"""What operators lose of which inputs: normal, exponential and uniform ones, and a real gradient.

    python -m mpi_examples.compressed_inputs
    python -m mpi_examples.compressed_inputs --steps 500 --output docs/compressed-inputs.png

After the comparison in Beznosikov, Horvath, Richtarik and Safaryan, "On Biased Compression for
Distributed Learning" (JMLR 2023).  Operators promise something about the worst input; here is what
they do to inputs as they are.  For each operator: the bits of its message for an element, headers
and indices included, and the relative error |C(x) - x|^2 / |x|^2, of unbiased operators also at the
scale that makes it least.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch.nn import functional

from hvd_compress.blocks import (
    allgather,
    allreduce,
    chain,
    natural,
    natural_dithering,
    random_k,
    scaled_sign,
    top_k,
)
from hvd_compress.cli.options import parser_of, picture_file
from hvd_compress.engines.local import LocalEngine
from hvd_compress.reduce import Reducer
from hvd_compress.studies.step_sizes import kept_by_top_k
from mpi_examples.data import digits
from mpi_examples.models import mlp
from mpi_examples.report import save
from mpi_examples.study import check_counts

DENSITIES = (0.001, 0.01, 0.1, 0.3)
LEVELS = 7


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--elements", type=int, default=100_000, help="of an input that is drawn")
    parser.add_argument("--draws", type=int, default=5, help="of each input")
    parser.add_argument("--steps", type=int, default=50, help="before the gradient is taken")
    parser.add_argument(
        "--output", type=picture_file, default=Path("results/compressed-inputs.png")
    )
    options = parser.parse_args()
    check_counts(parser, options, "draws", "steps")
    if options.elements < 1000:
        parser.error("--elements must be 1000 or more, of which top-k takes one in 1000")
    return options


def operators() -> dict[str, dict[str, object]]:
    """By family, from few bits to many; random-k draws elements that all ranks know."""
    coded, known = natural_dithering(LEVELS, 512), [f"{density:.1%}" for density in DENSITIES]
    densities = dict(zip(known, DENSITIES, strict=True))
    return {
        "random-k": {name: allreduce(select=random_k(k)) for name, k in densities.items()},
        "top-k": {name: allgather(top_k(k)) for name, k in densities.items()},
        "top-k + dithering": {name: allgather(top_k(k), coded) for name, k in densities.items()},
        "natural dithering": {
            f"{levels} levels": allgather(natural_dithering(levels, 512)) for levels in (3, 5, 7)
        },
        "natural compression": {"": allgather(natural())},
        "scaled sign": {"": allgather(scaled_sign())},
    }


def gradients(steps: int, draws: int) -> list[np.ndarray]:
    """Of the middle matrix of a network on the digits, after some steps of SGD and more."""
    torch.manual_seed(0)
    x, _, y, _ = digits(0)
    images, labels = torch.from_numpy(x), torch.from_numpy(y)
    model = mlp(x.shape[1:], 10)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found = []
    for step in range(steps + draws):
        batch = torch.randint(len(images), (64,))
        sgd.zero_grad()
        functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        if step >= steps:
            found.append(model[3].weight.grad.numpy().reshape(-1).copy())
        sgd.step()
    return found


def inputs(options: argparse.Namespace) -> dict[str, list[np.ndarray]]:
    random = np.random.default_rng(0)
    draw = {
        "normal": random.standard_normal,
        "exponential": random.standard_exponential,
        "uniform": lambda n: random.uniform(-1, 1, n),
    }
    found = {
        name: [of(options.elements).astype(np.float32) for _ in range(options.draws)]
        for name, of in draw.items()
    }
    return found | {"gradient": gradients(options.steps, options.draws)}


class Loss(NamedTuple):
    """Bits an element; the relative error as it is, and at the scale that makes it least."""

    bits: float
    error: float
    scaled: float


def loss(via: object, xs: list[np.ndarray]) -> Loss:
    """Means over the inputs."""
    found = []
    for x in xs:
        reducer = Reducer(chain(via=via), LocalEngine())
        c = reducer.reduce({"x": x})["x"].astype(np.float64)
        square = float(x.astype(np.float64) @ x)
        sent = reducer.stats().total.bytes_sent
        least = 1 - float(c @ x) ** 2 / (float(c @ c) * square)
        found.append((8 * sent / len(x), float(((c - x) ** 2).sum()) / square, least))
    return Loss(*(statistics.mean(column) for column in zip(*found, strict=True)))


def table(losses: dict[str, dict[str, dict[str, Loss]]]) -> str:
    """A row for each operator, with its error for each input."""
    lines = [f"{'operator':28} {'bits':>6}" + "".join(f" {name:>15}" for name in losses)]
    lines.append("-" * len(lines[0]))
    for family, members in next(iter(losses.values())).items():
        for member in members:
            own = [by_family[family][member] for by_family in losses.values()]
            line = f"{f'{family} {member}':28} {own[0].bits:6.2f}"
            for one in own:
                scaled = f" ({one.scaled:.3f})" if one.error - one.scaled > 5e-4 else ""
                line += f" {f'{one.error:.3f}{scaled}':>15}"
            lines.append(line)
    for density in DENSITIES:
        line = f"{f'top-k {density:.1%}, in theory':28} {'':6}"
        for name in losses:
            known = name != "gradient"
            line += f" {f'{1 - kept_by_top_k(density, name):.3f}' if known else '':>15}"
        lines.append(line)
    return "\n".join(lines)


def picture(losses: dict[str, dict[str, dict[str, Loss]]], path: Path) -> None:
    figure, all_axes = plt.subplots(1, 4, figsize=(16, 4.4), sharey=True, layout="constrained")
    for axes, (name, by_family) in zip(all_axes, losses.items(), strict=True):
        for family, members in by_family.items():
            bits, _, errors = zip(*members.values(), strict=True)
            axes.plot(bits, errors, "o-", label=family)
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="bits an element",
            title=f"{name} inputs" if name != "gradient" else "gradient of a network",
        )
        axes.grid(alpha=0.3)
    all_axes[0].set_ylabel("relative error, at the best scale")
    all_axes[-1].legend(fontsize="small")
    save(figure, path)


def main() -> None:
    options = arguments()
    losses = {
        name: {
            family: {member: loss(via, xs) for member, via in members.items()}
            for family, members in operators().items()
        }
        for name, xs in inputs(options).items()
    }
    print(f"relative errors; in brackets at the best scale. {options.draws} draws of each input\n")
    print(table(losses))
    print("\nof |x|^2, 1 % by top-k keep so many times what random ones keep:", end=" ")
    for name in losses:
        own = [1 - losses[name][family]["1.0%"].error for family in ("top-k", "random-k")]
        print(f"{name} {own[0] / own[1]:.1f}", end="; " if name != "gradient" else "\n")
    picture(losses, options.output)
    print(f"picture: {options.output.resolve()}")


if __name__ == "__main__":
    main()
