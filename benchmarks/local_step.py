"""Time of one rank's local work for a step of DGC on ResNet-50's matrices: momentum, accumulation
and the choice of the largest 0.1 %, beside the same arrays being read and written only.

    python benchmarks/local_step.py --threads 1 2
    python benchmarks/local_step.py --device cuda
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_compress import kernels
from hvd_compress.advisor.shapes import resnet50
from hvd_compress.cli.options import parser_of

parser = parser_of(__doc__)
parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
parser.add_argument("--threads", type=int, nargs="+", default=[1], help="on the CPU")
parser.add_argument("--rounds", type=int, default=30)
parser.add_argument("--density", type=float, default=0.001)
options = parser.parse_args()

SIZES = [math.prod(shape) for shape in resnet50().values() if len(shape) > 1]
COUNTS = [math.ceil(options.density * n) for n in SIZES]


def on_cpu(function: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """The result of a call, and how many seconds it took."""
    start = time.perf_counter()
    result = function(*arguments)
    return result, time.perf_counter() - start


def on_gpu(function: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """The same by the GPU's clock, which does not see how long the first launch takes the host."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(10**6)  # cycles, in which the host gets ahead
    start.record()
    result = function(*arguments)
    end.record()
    end.synchronize()
    return result, start.elapsed_time(end) / 1000


class OnCPU:
    """Steps whose results are not needed: old states are kept where gradients were."""

    loops, timed = kernels, staticmethod(on_cpu)

    def __init__(self) -> None:
        self._selection = kernels.TopKSelection(SIZES, COUNTS)
        self._spare = [np.full(n, 0, np.float32) for n in SIZES]  # so that no page of them is new

    def arrays(self, gradients: list[Any], states: list[tuple[Any, Any]]) -> kernels.Steps:
        rows = zip(gradients, states, self._spare, strict=True)
        return kernels.Steps.of((g, v, v, u, u, g, kept) for g, (u, v), kept in rows)

    def step(self, arrays: kernels.Steps) -> None:
        found = self._selection.select(arrays, 0.9)
        left = np.zeros_like(found.values)
        self._selection.settle(arrays, found.indices, left, True, found.finite)


class OnGPU:
    """Steps with results, which take the place of the gradients."""

    timed = staticmethod(on_gpu)

    def __init__(self) -> None:
        import torch

        from hvd_compress.torch.triton import loops

        self.loops = loops
        self._step = loops.TopKStep(SIZES, COUNTS, "float32", torch.empty(0, device="cuda"))

    def arrays(self, gradients: list[Any], states: list[tuple[Any, Any]]) -> list[kernels.Column]:
        x, u, v = map(kernels.Column, (gradients, *zip(*states, strict=True)))
        return [x, x, v, u]

    def step(self, arrays: list[kernels.Column]) -> None:
        self._step.settle(arrays, self._step.encode(arrays, 0.9), 1, masking=True)


def measure(work: Any, pool: Any, make: Callable[[int], Any]) -> tuple[float, float]:
    """Medians of a step and of the stream, in seconds."""

    def arrays() -> list[Any]:
        return [make(n) for n in SIZES]

    random = np.random.default_rng(0)
    bounds = list(itertools.pairwise([0, *itertools.accumulate(SIZES)]))
    own, plain = ([*zip(arrays(), arrays(), strict=True)] for _ in range(2))
    own_gradients = arrays()
    steps, streams = [], []
    for _ in range(options.rounds):
        shift = 4 * int(random.integers(250_000))  # 16 bytes: where tensors start
        gradients = [pool[shift + a : shift + b] for a, b in bounds]
        rows = [(g, *its) for g, its in zip(gradients, plain, strict=True)]
        streams.append(work.timed(work.loops.stream, rows)[1])
        for fresh, g in zip(gradients, own_gradients, strict=True):
            g[:] = fresh
        steps.append(work.timed(work.step, work.arrays(own_gradients, own))[1])
    # In the first steps the thresholds are not known, and change.
    return tuple(statistics.median(x[options.rounds // 3 :]) for x in (steps, streams))


def report(where: str, step: float, stream: float) -> None:
    print(
        f"{sum(SIZES):,} elements, {where}: step {1000 * step:.3g} ms, "
        f"stream {1000 * stream:.3g} ms, ratio {step / stream:.2f}"
    )


def main() -> None:
    if options.device == "cuda":
        import torch

        pool = torch.randn(sum(SIZES) + 10**6, device="cuda")
        times = measure(OnGPU(), pool, lambda n: torch.zeros(n, device="cuda"))
        report(torch.cuda.get_device_name(), *times)
        return
    pool = np.random.default_rng(0).standard_normal(sum(SIZES) + 10**6, np.float32)
    for threads in options.threads:
        kernels.threads = lambda threads=threads: threads
        times = measure(OnCPU(), pool, lambda n: np.full(n, 0, np.float32))
        report(f"threads {threads}", *times)


if __name__ == "__main__":
    main()
