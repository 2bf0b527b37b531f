"""Time of one rank's local work for a step of DGC on ResNet-50's matrices: momentum, accumulation
and the choice of the largest 0.1 %, beside the same arrays being read and written only.

    python benchmarks/local_step.py --threads 1 2
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from model_shapes import resnet50

from hvd_compress import kernels

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--threads", type=int, nargs="+", default=[1])
parser.add_argument("--rounds", type=int, default=30)
parser.add_argument("--density", type=float, default=0.001)
options = parser.parse_args()

SIZES = [math.prod(shape) for shape in resnet50().values() if len(shape) > 1]


def arrays() -> list[np.ndarray]:
    """Written once, so that no page of them is new."""
    return [np.full(n, 0, np.float32) for n in SIZES]


def timed(function: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    result = function(*arguments)
    return result, time.perf_counter() - start


def main() -> None:
    random = np.random.default_rng(0)
    pool = random.standard_normal(sum(SIZES) + 10**6, np.float32)
    bounds = list(itertools.pairwise([0, *itertools.accumulate(SIZES)]))
    for threads in options.threads:
        kernels.threads = lambda threads=threads: threads
        selection = kernels.Selection(SIZES, [math.ceil(options.density * n) for n in SIZES])
        old, new, plain = ([*zip(arrays(), arrays(), strict=True)] for _ in range(3))
        steps, streams = [], []
        for _ in range(options.rounds):
            shift = int(random.integers(10**6))
            gradients = [pool[shift + a : shift + b] for a, b in bounds]
            rows = [(g, *own) for g, own in zip(gradients, plain, strict=True)]
            streams.append(timed(kernels.stream, rows)[1])
            step = [
                kernels.Step(g, v, v1, u, u1)
                for g, (u, v), (u1, v1) in zip(gradients, old, new, strict=True)
            ]
            found, seconds = timed(selection.accumulate, step, 0.9)
            left = np.zeros_like(found.values)
            _, more = timed(selection.settle, step, found.indices, left, True)
            steps.append(seconds + more)
            old, new = new, old
        # In the first steps the thresholds are not known, and change.
        step_, stream = (statistics.median(x[options.rounds // 3 :]) for x in (steps, streams))
        print(
            f"{sum(SIZES):,} elements, threads {threads}: step {1000 * step_:.1f} ms, "
            f"stream {1000 * stream:.1f} ms, ratio {step_ / stream:.2f}"
        )


if __name__ == "__main__":
    main()
