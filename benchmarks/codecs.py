"""Time that codecs take to encode and to decode, beside their bytes being read and written only.

    python benchmarks/codecs.py --elements 25500000
    python benchmarks/codecs.py --device cuda

A row has the median time of encoding, of decoding, and of adding what is decoded to an array, and
how many times the floor that is.  The floor reads what goes in and writes what comes out, by
streams in turn with the codec.  Codecs that round at random cannot do
without random numbers: "draw" is the time that those alone take.

On a GPU, encoding ends when the bytes are in host memory, and decoding begins with bytes there.
"On the host" is the time of what would be done without kernels: to copy the numbers to host memory,
encode and decode them there, and copy the values back.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_compress import Context, codecs
from hvd_compress.cli.options import parser_of
from hvd_compress.codecs.at_random import own_generator
from hvd_compress.kernels import codecs as loops

parser = parser_of(__doc__)
parser.add_argument("--elements", type=int, default=25_500_000)
parser.add_argument("--rounds", type=int, default=9)
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
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
    return np.full(n, 1, dtype)


def milliseconds(function: Callable[..., Any], *arguments: Any) -> float:
    start = time.perf_counter()
    function(*arguments)
    return 1000 * (time.perf_counter() - start)


def row(name: str, codec: codecs.Codec, x: np.ndarray, pool: np.ndarray) -> None:
    out, code = array(x.size, "float32"), array(codec.size(x.size, x.dtype), "uint8")
    raw = out.view(np.uint8)
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
        ):
            times.setdefault(what, []).append(milliseconds(function, *arguments))
    found = {what: statistics.median(own) for what, own in times.items()}
    print(f"{name:20}{code.size / x.size * 8:7.2f}", end="")
    for what in ("encode", "decode"):
        print(f"{found[what]:10.2f}{found[what] / found[f'floor of {what}']:7.2f}", end="")
    print(f"{found['add']:10.2f}", flush=True)


def on_gpu(device: str) -> None:
    import torch

    from hvd_compress.torch.triton import codec_kernels as kernels
    from hvd_compress.torch.triton.codecs import Codes

    def timed(function: Callable[..., Any], *arguments: Any) -> float:
        def call() -> None:
            function(*arguments)
            torch.cuda.synchronize()

        torch.cuda.synchronize()
        return milliseconds(call)

    def encode(codes: Codes, x: Any, random: np.random.Generator) -> None:
        codes.encode(x, [random], on_device)
        code.copy_(on_device)

    def decode(codes: Codes, how: Any) -> None:
        on_device.copy_(code)
        codes.read(on_device, out, how)

    def through_host(
        codec: codecs.Codec, x: Any, random: np.random.Generator, code: np.ndarray, out: Any
    ) -> None:
        codec.put(x.cpu().numpy(), random, code, values)
        out.copy_(torch.from_numpy(values))

    n = options.elements
    values = array(n, "float32")
    pool = torch.randn(n + 1000 * (options.rounds + 1), device=device)
    out = torch.zeros(n, device=device)
    print(f"{n:,} float32 ({4 * n / 1e6:.0f} MB), {torch.cuda.get_device_name()}; ms")
    print(f"{'':20}{'bits':>7}{'encode':>10}{'decode':>10}{'add':>10}{'on the host':>14}")
    for name, codec in CODECS.items():
        size = codec.size(n, np.dtype("float32"))
        code = torch.zeros(size + -size % 4, dtype=torch.uint8, pin_memory=True)
        on_device, its_code = code.to(device), code[:size].numpy()
        codes, times = Codes([codec], [slice(0, n)], out, [0]), []
        for step in range(options.rounds + 1):
            x, random = pool[step * 1000 :][:n].clone(), own_generator(Context(step=step))
            times.append(
                (
                    timed(encode, codes, x, random),
                    timed(decode, codes, kernels.WRITE),
                    timed(decode, codes, kernels.ADD),
                    timed(through_host, codec, x, random, its_code, out),
                )
            )
        # In the first round kernels are compiled.
        found = [statistics.median(own) for own in zip(*times[1:], strict=True)]
        cells = "".join(f"{own:10.2f}" for own in found[:3])
        print(f"{name:20}{size / n * 8:7.2f}{cells}{found[3]:14.2f}", flush=True)


def main() -> None:
    if options.device == "cuda":
        on_gpu("cuda")
        return
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    n = options.elements
    pool = np.random.default_rng(0).standard_normal(n + 1000 * options.rounds, np.float32)
    x, out = array(n, "float32"), array(n, "float32")
    print(f"{n:,} float32 ({x.nbytes / 1e6:.0f} MB), threads {options.threads}; ms")
    print(f"{'':20}{'bits':>7}{'encode':>10}{'times':>7}{'decode':>10}{'times':>7}{'add':>10}")
    for name, codec in CODECS.items():
        row(name, codec, x, pool)
    draws = [
        milliseconds(loops.draw, own_generator(Context(step=step)), out)
        for step in range(options.rounds)
    ]
    print(f"{'draw':27}{statistics.median(draws):10.2f}")


if __name__ == "__main__":
    main()
