"""Time to synchronise ResNet-50's gradients: Horovod dense and fp16, and this package, in one run.

    python benchmarks/sync_resnet50.py                      # 4 ranks on this machine
    python benchmarks/sync_resnet50.py --framework tensorflow
    horovodrun -np 4 -H a:1,b:1,c:1,d:1 python benchmarks/sync_resnet50.py

Every method gets the same random gradients in the real 161 shapes, from a real backward pass, which
is one multiplication a tensor here; the slowest rank counts. The methods take turns, in another
order each round, so that the machine's load and caches hit all alike.

Under PyTorch there are two more rows: "stream", what every rank has to read and write for momentum
and residuals, all at once; and "plain top-k", written as it commonly is. The floor of a row is the
time of "stream", for methods with a residual, and that of its bytes at the rate of the line, which
is measured first. Under TensorFlow the time that graphs spend in Python is shown too.
"""

from __future__ import annotations

import argparse
import importlib
import math
import statistics

from model_shapes import resnet50
from tqdm import tqdm

from hvd_compress.integrations.launch import under_horovodrun

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--framework", choices=["torch", "tensorflow"], default="torch")
parser.add_argument("--rounds", type=int, default=15, help="samples per optimizer")
parser.add_argument("--warmup", type=int, default=3, help="rounds that are not counted")
parser.add_argument("--methods", nargs="+", metavar="NAME", help="a selection of the rows")
parser.add_argument("--density", type=float, default=0.001)
parser.add_argument("--ranks", type=int, default=4, help="when started without horovodrun")
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
        "dgc, fp16 values": hvd.DGC(density=options.density, values="float16"),
        "topk": hvd.TopK(density=options.density),
        "powersgd": hvd.PowerSGD(rank=2),
    }
    chosen = options.methods or list(methods)
    if unknown := [name for name in chosen if name not in methods]:
        raise SystemExit(f"--methods {unknown[0]}: known are {', '.join(methods)}")
    contenders = [Contender(name, methods[name]) for name in chosen]
    rate = stream = None
    if options.framework == "torch":
        rate, stream = backend.line_rate(), backend.Stream("stream")
        contenders += [stream, backend.PlainTopK("plain top-k", options.density)]
    sent = {"Horovod dense": dense, "Horovod fp16": dense / 2}
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
    print(f"{'':18} {'median':>9} {'min':>9} {'max':>9}", end="")
    print(f" {'speed-up':>9} {'sent a step':>13} {'ratio':>8}", end="")
    print(f" {'floor':>9} {'times':>6}" if rate else "", end="")
    print(f" {'in Python':>10}" if contenders[0].python else "")
    for contender in contenders:
        if contender.compression is not None:
            total = contender.compression.stats().total
            sent[contender.name] = total.bytes_sent / total.steps
        median = statistics.median(contender.seconds)
        count = sent.get(contender.name, getattr(contender, "bytes_sent", 0))
        print(
            f"{contender.name:18} {1000 * median:6.0f} ms {1000 * min(contender.seconds):6.0f} ms"
            f" {1000 * max(contender.seconds):6.0f} ms {base / median:8.1f}x",
            end="",
        )
        if contender is stream:
            print()
            continue
        print(f" {count / 1000:10,.1f} kB {dense / count:7.1f}x", end="")
        if rate is not None:
            # An allreduce moves two arrays but for a share, an allgather all messages to all.
            is_dense = count >= dense / 2
            others = hvd.size() - 1
            floor = count * others * (2 / hvd.size() if is_dense else 1) / rate
            if not is_dense:
                floor += statistics.median(stream.seconds)
            print(f" {1000 * floor:6.0f} ms {median / floor:5.1f}x", end="")
        own = contender.python[options.warmup :]
        print(f" {1000 * statistics.median(own):7.1f} ms" if own else "")
    print("\nWhere the time goes on rank 0, on average:")
    for contender in contenders:
        if contender.compression is not None and (times := contender.compression.stats().times):
            print(f"{contender.name:18} {times.line()}")


if __name__ == "__main__":
    main()
