"""Time that codecs take to encode and to decode, beside their bytes being read and written only.

    python benchmarks/codecs.py --elements 25500000

A row has, for encoding, for decoding, and for adding what is decoded to an array: the median time,
and how many times the floor that is.  The floor reads what goes in and writes what comes out, by
streams in turn with the codec; adding also reads the array.  Codecs that round at random cannot do
without random numbers: "draw" is the time that those alone take.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_compress import Context, codecs, kernels
from hvd_compress.kernels import codecs as loops
from hvd_compress.operators.random_k import own_generator

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--elements", type=int, default=25_500_000)
parser.add_argument("--rounds", type=int, default=9)
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--framework", choices=("numpy", "torch"), default="numpy")
parser.add_argument("--definitions", action="store_true", help="what NumPy takes, without loops")
options = parser.parse_args()

CODECS = {
    "SignSGD": codecs.sign(),
    "EFSignSGD": codecs.scaled_sign(),
    "OneBit": codecs.column_means(2048),
    "linear, 8 bits": codecs.linear(8, 2048),
    "FP8": codecs.float8("e4m3", 512),
    "QSGD, 2 bits": codecs.uniform_dithering(1, 512, "max"),
    "QSGD, 4 bits": codecs.uniform_dithering(7, 512, "max"),
    "QSGD, 4 bits, l2": codecs.uniform_dithering(7, 512, "l2"),
    "QSGD, 8 bits": codecs.uniform_dithering(127, 512, "max"),
    "TernGrad": codecs.ternary(2.5),
    "NaturalCompression": codecs.natural(),
    "NaturalDithering": codecs.natural_dithering(),
}


def array(n: int, dtype: str) -> np.ndarray:
    """Written once, so that no page of it is new."""
    if options.framework == "torch":
        import torch

        return torch.full((n,), 1, dtype=getattr(torch, dtype)).numpy()
    return np.full(n, 1, dtype)


def milliseconds(function: Callable[..., Any], *arguments: Any) -> float:
    start = time.perf_counter()
    function(*arguments)
    return 1000 * (time.perf_counter() - start)


def row(name: str, codec: codecs.Codec, x: np.ndarray, pool: np.ndarray) -> None:
    out, code = array(x.size, "float32"), array(codec.size(x.size, x.dtype), "uint8")
    raw, both = out.view(np.uint8), np.concatenate([code, x.view(np.uint8)])
    times: dict[str, list[float]] = {}
    for step in range(options.rounds):
        x[:] = pool[step * 1000 : step * 1000 + x.size]
        random = own_generator(Context(step=step))
        for what, function, arguments in (
            ("encode", codec.encode_to, (x, random, code)),
            ("floor of encode", loops.copy, (x.view(np.uint8), code)),
            ("decode", codec.decode_to, (code, out)),
            ("floor of decode", loops.copy, (code, raw)),
            ("add", codec.decode_to, (code, out, True)),
            ("floor of add", loops.copy, (both, raw)),
        ):
            times.setdefault(what, []).append(milliseconds(function, *arguments))
    found = {what: statistics.median(own) for what, own in times.items()}
    cells = [f"{name:20}{code.size / x.size * 8:7.2f}"]
    for what in ("encode", "decode", "add"):
        rate = x.nbytes / found[what] / 1e6
        cells.append(f"{found[what]:9.2f}{rate:7.1f}{found[what] / found[f'floor of {what}']:7.2f}")
    print("".join(cells), flush=True)


def main() -> None:
    if options.framework == "torch":
        import torch

        torch.set_num_threads(options.threads)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    if options.definitions:
        kernels.is_compiled = lambda: False
    n = options.elements
    pool = np.random.default_rng(0).standard_normal(n + 1000 * options.rounds, np.float32)
    x, out = array(n, "float32"), array(n, "float32")
    print(f"{n:,} float32 ({x.nbytes / 1e6:.0f} MB), threads {options.threads}; GB/s of float32")
    print(
        f"{'':20}{'bits':>7}"
        + "".join(
            f"{what + ' ms':>9}{'GB/s':>7}{'times':>7}" for what in ("encode", "decode", "add")
        )
    )
    for name, codec in CODECS.items():
        row(name, codec, x, pool)
    draws = [
        milliseconds(loops.draw, own_generator(Context(step=step)), out)
        for step in range(options.rounds)
    ]
    print(f"{'draw':27}{statistics.median(draws):9.2f}")


if __name__ == "__main__":
    main()
