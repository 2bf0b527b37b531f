"""Two workers on the two sides of a hill: EASGD stays between the minima, Leader SGD leaves.

    python -m mpi_examples.leader_symmetry --output docs/leader-symmetry.png

What is minimised is f(x) = (x^2 - 1)^2, by workers that begin at 0.4 and -0.41; its minima are
at 1 and -1, and between them, at 0, is the top of a hill.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from hvd_compress.cli.options import parser_of, picture_file
from hvd_compress.systems import Ranks, TrainingMethod
from hvd_compress.systems.rounds import EASGD, LeaderSGD
from mpi_examples.report import save

START = [0.4, -0.41]


def f(x: float) -> float:
    return (x**2 - 1) ** 2


def descend(method: TrainingMethod, start: list[float], lr: float, steps: int) -> np.ndarray:
    """Where both workers were after each step and, in the last column, what is tested."""
    world = Ranks(method, len(start))
    x = [{"x": np.array([own])} for own in start]
    if isinstance(method, EASGD):
        # Ranks usually begin at one point, which is the centre; these have theirs in the middle.
        world.states = [{"centre": {"x": np.zeros(1)}} for _ in start]
    path = [[*start, 0.0]]
    for _ in range(steps):
        gradients = [4 * own["x"] * (own["x"] ** 2 - 1) for own in x]
        pulled = world.before_step(x, losses=[f(own["x"][0]) for own in x])
        x = [{"x": own["x"] - lr * g} for own, g in zip(pulled, gradients, strict=True)]
        x = world.after_step(x)
        tested = world.consensus(x)[0]["x"][0]
        path.append([*(float(own["x"][0]) for own in x), float(tested)])
    return np.array(path)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rho", type=float, default=1.5, help="strength of the pull")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--output", type=picture_file, default=Path("results/leader-symmetry.png"))
    options = parser.parse_args()
    pull = options.lr * options.rho
    if not 0 < pull <= 0.5:
        parser.error("--lr times --rho must be in (0, 0.5]")
    if options.steps < 1:
        parser.error("--steps must be 1 or more")
    leader = LeaderSGD(local_every=1, global_every=1, global_pull=pull, local_pull=0, local_drift=0)
    elastic = EASGD(sync_every=1, alpha=pull, beta=2 * pull)
    paths = {
        "EASGD": descend(elastic, START, options.lr, options.steps),
        "Leader SGD": descend(leader, START, options.lr, options.steps),
    }
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    print(
        f"f(x) = (x^2 - 1)^2, lr {options.lr:g}, pull lr * {options.rho:g}, {options.steps} steps"
    )
    for axis, (name, path) in zip(axes, paths.items(), strict=True):
        one, other, tested = (round(float(value), 4) + 0.0 for value in path[-1])
        print(f"{name}: workers {one:.4f} and {other:.4f}, tested {tested:.4f}, f {f(tested):.4f}")
        axis.plot(path[:, :2], label=["worker 0", "worker 1"])
        axis.plot(path[:, 2], "--", color="black", label="what is tested")
        axis.set(title=f"{name} on $(x^2 - 1)^2$", xlabel="step")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("x; the minima are at 1 and -1")
    axes[0].legend(loc=(0.6, 0.65))
    save(figure, options.output)
    print(f"picture: {options.output.resolve()}")


if __name__ == "__main__":
    main()
