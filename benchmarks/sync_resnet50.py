"""Time to synchronise ResNet-50's gradients: Horovod dense and fp16, and this package, in one run.

    python benchmarks/sync_resnet50.py                      # 4 ranks on this machine
    python benchmarks/sync_resnet50.py --framework tensorflow
    horovodrun -np 4 -H a:1,b:1,c:1,d:1 python benchmarks/sync_resnet50.py

Every method gets the same random gradients in the real 161 shapes, from a real backward pass, which
is one multiplication a tensor here; the slowest rank counts. The methods take turns, in another
order each round, so that the machine's load and caches hit all alike.

Under PyTorch there are more rows: "backward" alone, which all others contain; "stream", what every
rank has to read and write for momentum and residuals, all at once; "plain top-k", written as it
commonly is; and PyTorch's own DistributedDataParallel with its hooks. "beyond" is what a row takes
beyond backward. Its floor is the time of "stream", for methods with a residual, and that of its
bytes at the rate of the line, which is measured first; "times" is the quotient of the two. "step"
is the optimizer's step that follows, which is SGD's with momentum 0.9.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import statistics
from pathlib import Path

from tqdm import tqdm

from hvd_compress.advisor.shapes import resnet50
from hvd_compress.cli.options import picture_file
from hvd_compress.integrations.launch import under_horovodrun

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--framework", choices=["torch", "tensorflow"], default="torch")
parser.add_argument("--rounds", type=int, default=15, help="samples per optimizer")
parser.add_argument("--warmup", type=int, default=3, help="rounds that are not counted")
parser.add_argument(
    "--methods",
    nargs="+",
    metavar="NAME",
    help='rows, or methods such as topk:density=0.01 or fp8; "DDP fp8": as a hook',
)
parser.add_argument("--density", type=float, default=0.001)
parser.add_argument("--ranks", type=int, default=4, help="when started without horovodrun")
parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured")
parser.add_argument("--picture", type=picture_file, metavar="FILE", help="draw the medians")
parser.add_argument("--title", default="", help="of the picture")
parser.add_argument("--controller", choices=["gloo", "mpi"], default="mpi")
options = parser.parse_args()
under_horovodrun(options.ranks, options.controller)

backend = importlib.import_module(f"contender_{options.framework}")
hvd, Contender = backend.hvd, backend.Contender


def main() -> None:
    hvd.init()
    backend.seed(hvd.rank())
    elements = sum(math.prod(shape) for shape in resnet50().values())
    dense = 4.0 * elements
    methods = {
        "Horovod dense": hvd.Compression.none,
        "Horovod fp16": hvd.Compression.fp16,
        "none": hvd.NoCompression,
        "fp16": hvd.FP16,
        "dgc": hvd.DGC(density=options.density),
        "dgc, sparse step": hvd.DGC(density=options.density),
        "dgc over MPI": hvd.DGC(density=options.density),
        "dgc compact": hvd.DGC.compact(density=options.density),
    }
    is_torch = options.framework == "torch"
    hooks = {"DDP": None, "DDP fp16": "fp16", "DDP powersgd": "powersgd"} if is_torch else {}
    known = [*methods, *hooks]
    if not is_torch:
        known = [name for name in known if name not in ("dgc, sparse step", "dgc over MPI")]
    usual = [name for name in known if name not in ("none", "fp16")]
    chosen = options.methods or usual
    for name in chosen:
        if name not in known:
            table, own = methods, name
            if is_torch and name.startswith("DDP "):
                table, own = hooks, name.removeprefix("DDP ")
            try:
                table[name] = methods[own] if own in methods else hvd.as_compressor(own)
            except hvd.ConfigError as error:
                raise SystemExit(
                    f"--methods {name}: rows are {', '.join(known)}; {error}"
                ) from None
    contenders = []
    for name in chosen:
        if name in hooks:
            contenders.append(backend.DDP(name, hooks[name]))
        else:
            more = {"sparse_step": True} if "sparse step" in name else {}
            if "over MPI" in name:
                more["over"] = backend.over_mpi
            contenders.append(Contender(name, methods[name], **more))
    rate = stream = backward = None
    if is_torch:
        rate, stream = backend.line_rate(), backend.Stream("stream")
        backward = backend.Backward("backward")
        contenders += [backward, stream, backend.PlainTopK("plain top-k", options.density)]
    received: dict[str, float] = {}
    sent = {"Horovod dense": dense, "Horovod fp16": dense / 2, "DDP": dense, "DDP fp16": dense / 2}
    rounds = options.warmup + options.rounds
    with tqdm(total=rounds * len(contenders), disable=hvd.rank() != 0, ncols=90) as bar:
        for number in range(rounds):
            gradients = backend.random_gradients()
            turn = number % len(contenders)
            if number == options.warmup:
                for contender in contenders:
                    if contender.compression is not None:
                        contender.compression.reset_stats()
            for contender in contenders[turn:] + contenders[:turn]:
                seconds = contender.sample(gradients)
                if number >= options.warmup:
                    contender.seconds.append(seconds)
                bar.update()
    if hvd.rank() != 0:
        return
    base = statistics.median(contenders[0].seconds)
    print(f"\nResNet-50: {elements:,} gradients in {len(resnet50())} tensors, {hvd.size()} ranks")
    if rate is not None:
        print(f"the line: {rate / 1e6:,.0f} MB/s to each rank, all at once")
    print(
        f"{'':17} {'median':>8} {'min':>8} {'max':>8} {'speed-up':>8} {'sent':>12} {'ratio':>7}",
        end="",
    )
    print(f" {'beyond':>8} {'floor':>8} {'times':>6} {'step':>8}" if rate else "", end="")
    print(f" {'in Python':>10}" if contenders[0].python else "")
    for contender in contenders:
        if contender.compression is not None:
            total = contender.compression.stats().total
            sent[contender.name] = total.bytes_sent / total.steps
            received[contender.name] = total.bytes_received / total.steps
        count = sent.get(contender.name, getattr(contender, "bytes_sent", None))
        median = statistics.median(contender.seconds)
        print(f"{contender.name:17}", *map(in_ms, (median, *extremes(contender.seconds))), end="")
        print(f" {base / median:7.1f}x", end="")
        if contender in (stream, backward):
            print()
            continue
        known = count is not None
        print(f" {count / 1000:9,.1f} kB {dense / count:6.1f}x" if known else 21 * " ", end="")
        if backward is not None:
            # "plain top-k" has no backward in it.
            whole = isinstance(contender, backend.PlainTopK)
            beyond = median - (0 if whole else statistics.median(backward.seconds))
            print(f" {in_ms(beyond)}", end="")
            if known:
                arrives = received.get(contender.name, count)
                floor = floor_of(count, arrives, dense, rate, statistics.median(stream.seconds))
                print(f" {in_ms(floor)} {beyond / floor:5.1f}x", end="")
            else:
                print(16 * " ", end="")
            steps = contender.steps[options.warmup :]
            print(f" {in_ms(statistics.median(steps))}" if steps else "", end="")
        own = contender.python[options.warmup :]
        print(f" {1000 * statistics.median(own):7.1f} ms" if own else "")
    print("\nWhere the time goes on rank 0, on average:")
    for contender in contenders:
        if contender.compression is not None and (times := contender.compression.stats().times):
            print(f"{contender.name:18} {times.line()}")

    medians = {c.name: statistics.median(c.seconds) for c in contenders}
    if options.json:
        found = {
            "ranks": hvd.size(),
            "line_bytes_per_s": rate,
            "rows": {
                c.name: {"seconds": c.seconds, "bytes_sent": sent.get(c.name)} for c in contenders
            },
        }
        options.json.write_text(json.dumps(found, indent=1))
        print(f"\nmeasured: {options.json}")
    if options.picture:
        draw({name: medians[name] for name in chosen}, options.picture)
        print(f"\npicture: {options.picture}")


def draw(medians: dict[str, float], picture: Path) -> None:
    """A bar for each row, in the order of their length."""
    import matplotlib.pyplot as plt

    names = sorted(medians, key=medians.__getitem__, reverse=True)
    seconds = [1000 * medians[name] for name in names]
    figure, axes = plt.subplots(figsize=(7, 0.6 + 0.3 * len(names)), layout="constrained")
    plain = ("Horovod", "DDP")
    bars = axes.barh(
        names, seconds, color=["#b0b0b0" if n.startswith(plain) else "#2a6f97" for n in names]
    )
    axes.bar_label(bars, [f"{value:,.0f} ms" for value in seconds], padding=3)
    axes.set_xlim(0, 1.12 * max(seconds))
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(options.title, loc="left", fontsize=10)
    figure.savefig(picture, dpi=150)


def in_ms(seconds: float) -> str:
    return f"{1000 * seconds:5.0f} ms"


def extremes(values: list[float]) -> tuple[float, float]:
    return min(values), max(values)


def floor_of(count: float, arrives: float, dense: float, rate: float, stream: float) -> float:
    """Seconds that a method cannot do without, which counts ``count`` bytes as sent and ``arrives``
    as received: an allreduce, whose two numbers are equal, moves two arrays but for a share."""
    if count >= dense / 2 or arrives <= 1.01 * count:
        arrives = count * (hvd.size() - 1) * 2 / hvd.size()
    return arrives / rate + (stream if count < dense / 2 else 0)


if __name__ == "__main__":
    main()
