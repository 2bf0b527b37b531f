"""The first step of MobileNetV2 under a tape, and later ones, with methods and without.

    python benchmarks/first_step_tensorflow.py

"first" is the time from the call of a ``tf.function`` with a tape to the end of its first step:
tracing and one step, for a new model each time; "CPU" is the processor's time of a rank in it,
which other programs change less, and "ratio" is of CPU; "nodes" is the size of that graph.
"exchange" is the time of a step in which backward is one multiplication a tensor, so that little
but the exchange is left, and "torch" the same under PyTorch, for tensors of the same shapes.
"Horovod fp32" is its own tape without a method. All are medians, and the methods take turns.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from turns import turns

from hvd_compress.advisor.shapes import mobilenet_v2
from hvd_compress.cli.options import parser_of
from hvd_compress.launch import under_horovodrun

METHODS = ["none", "fp16", "topk", "dgc", "onebit", "fp8", "powersgd:rank=2"]

parser = parser_of(__doc__)
parser.add_argument("--ranks", type=int, default=2)
parser.add_argument("--rounds", type=int, default=15, help="samples of an exchange")
parser.add_argument("--batch", type=int, default=2, help="images of 224 x 224 in the first step")
parser.add_argument("--first", type=int, default=3, help="samples of a first step")
parser.add_argument("--methods", nargs="+", default=METHODS)
parser.add_argument("--framework", choices=["torch", "tensorflow"], help=argparse.SUPPRESS)
parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
options = parser.parse_args()

HOROVOD = "Horovod fp32"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for framework in ("tensorflow", "torch"):
            results = Path(folder, framework)
            own = ["--framework", framework, "--results", str(results)]
            subprocess.run([sys.executable, *sys.argv, *own], check=True)
            found[framework] = json.loads(results.read_text())
    base = found["tensorflow"][HOROVOD]
    print(f"\n{'':12} {'first':>8} {'CPU':>8} {'ratio':>6} {'nodes':>7} {'exchange':>9}", end="")
    print(f" {'torch':>9} {'ratio':>6}")
    for name, row in found["tensorflow"].items():
        exchange, torch = row["exchange"], found["torch"][name]["exchange"]
        print(
            f"{name:12} {row['first']:6.1f} s {row['cpu']:6.1f} s {row['cpu'] / base['cpu']:6.2f}"
            f" {row['nodes']:7,} {1000 * exchange:6.1f} ms {1000 * torch:6.1f} ms"
            f" {exchange / torch:6.2f}"
        )


def rank() -> None:
    under_horovodrun(options.ranks, "mpi")
    backend = importlib.import_module(f"contender_{options.framework}")
    hvd = backend.hvd
    hvd.init()
    methods = {HOROVOD: hvd.Compression.none}
    methods |= {name: hvd.as_compressor(name) for name in options.methods}
    found: dict[str, dict[str, float]] = {name: {} for name in methods}
    if options.framework == "tensorflow":
        first_step(hvd, None)  # what is done once in a process
        samples = {name: [] for name in methods}
        for _, name in turns([*methods], options.first):
            samples[name].append(first_step(hvd, methods[name]))
        for name, own in samples.items():
            found[name] = {key: statistics.median(x[key] for x in own) for key in own[0]}
    weights = backend.zeros(mobilenet_v2())
    contenders = {name: backend.contender(name, weights) for name in methods}
    exchanges: dict[str, list[float]] = {name: [] for name in methods}
    for number, name in turns([*methods], options.rounds + 3):
        seconds, _ = contenders[name].sample(backend.random_gradients(mobilenet_v2()), 0.0)
        if number >= 3:
            exchanges[name].append(seconds)
    for name, seconds in exchanges.items():
        found[name]["exchange"] = statistics.median(seconds)
    if hvd.rank() == 0:
        options.results.write_text(json.dumps(found))


def first_step(hvd: Any, method: Any) -> dict[str, float]:
    import keras
    import numpy as np
    import tensorflow as tf

    tf.get_logger().setLevel("ERROR")  # each model has a graph of its own, and is not retracing
    keras.utils.set_random_seed(0)
    if method is None:
        model = keras.Sequential([keras.Input((224, 224, 3)), keras.layers.Conv2D(8, 3)])
        method = hvd.Compression.none
    else:
        model = keras.applications.MobileNetV2(weights=None)
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(images: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(images, training=True)))
        momentum = getattr(method, "takes_momentum", False)
        compression = (
            hvd.bind(method, model.trainable_variables, momentum=0.9) if momentum else method
        )
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    images = tf.random.normal([options.batch, 224, 224, 3])
    hvd.allreduce(tf.constant(0.0), name="barrier")
    start = np.array([time.perf_counter(), time.process_time()])
    step(images).numpy()
    seconds = np.array([time.perf_counter(), time.process_time()]) - start
    wall, cpu = hvd.allreduce(tf.constant(seconds), op=hvd.Max, name="seconds").numpy()
    graph = step.get_concrete_function(images).graph.as_graph_def()
    nodes = len(graph.node) + sum(len(f.node_def) for f in graph.library.function)
    return {"first": float(wall), "cpu": float(cpu), "nodes": nodes}


if __name__ == "__main__":
    if options.framework is None:
        main()
    else:
        rank()
