"""The laws for TensorFlow over MPI without Horovod, beside all that holds with it."""

from __future__ import annotations

import importlib
import sys
import time

import keras
import numpy as np
import tensorflow as tf

from hvd_compress import NoCompression, StagedWarmup, TopK
from hvd_compress.errors import (
    CompressionError,
    ConfigError,
    MismatchError,
    SetupError,
    UnsupportedError,
)
from tests.scenarios import applies
from tests.scenarios.driver import assert_same_everywhere, barrier, raises
from tests.scenarios.driver_tensorflow import hvd, hvd_keras, traced


def nothing_imports_horovod() -> None:
    """In all jobs of this kind it fails: see driver_tensorflow.py."""
    with raises(ImportError, "horovod"):
        importlib.import_module("horovod.tensorflow")
    assert {name for name in sys.modules if name.startswith("horovod")} == {"horovod"}
    for package in ("hvd_compress.tensorflow", "hvd_compress.tensorflow.keras"):
        with raises(SetupError, "needs Horovod"):
            _ = importlib.import_module(package).DistributedOptimizer


def functions_of_horovod() -> None:
    """Eagerly and in graphs, for all kinds of numbers."""
    rank, size = hvd.rank(), hvd.size()
    ranks = np.arange(size)

    def all_of_them(*tensors: tf.Tensor) -> list[tuple[tf.Tensor, ...]]:
        return [
            (
                hvd.allreduce(x, op=hvd.Sum),
                hvd.allreduce(x, op=hvd.Max),
                hvd.allgather(x[: 1 + rank]),
                hvd.broadcast(x, size - 1),
            )
            for x in tensors
        ]

    own = [
        tf.cast(tf.fill([size, 2], rank), dtype)
        for dtype in (tf.float32, tf.float16, tf.bfloat16, tf.int64)
    ]
    for function in (all_of_them, traced(all_of_them)):
        for found in function(*own):
            total, most, rows, last = (tf.cast(x, tf.float64).numpy() for x in found)
            np.testing.assert_array_equal(total, np.full([size, 2], ranks.sum()))
            np.testing.assert_array_equal(most, np.full([size, 2], size - 1))
            np.testing.assert_array_equal(rows, np.repeat(ranks, ranks + 1)[:, None] * [1, 1])
            np.testing.assert_array_equal(last, np.full([size, 2], size - 1))
    assert float(hvd.allreduce(tf.constant(rank + 0.0), prescale_factor=2.0)) == size - 1
    assert hvd.allgather_object({"rank": rank}) == [{"rank": r} for r in range(size)]
    assert hvd.broadcast_object([rank] * 1000, size - 1) == [size - 1] * 1000
    rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([rank]), tf.constant([size, 2]))
    found = tf.convert_to_tensor(hvd.allreduce(rows))
    np.testing.assert_allclose(found, np.full([size, 2], 1 / size))
    variable = keras.Variable(tf.fill([3], rank + 1.0))
    hvd.broadcast_variables([variable], root_rank=0)
    np.testing.assert_array_equal(variable.numpy(), np.ones(3))
    hvd.barrier()
    with raises(ConfigError, "root_rank"):
        hvd.broadcast(tf.ones([1]), size)


@applies(least=3)  # the sum of two is rounded once in any case
def half_precisions_are_added_in_float32() -> None:
    """Added in their own, ones would vanish beside the first number."""
    for dtype, large in ((tf.float16, 2048.0), (tf.bfloat16, 256.0)):
        variable = tf.Variable(tf.zeros([300], dtype))
        own = tf.cast(tf.fill([300], 1.0 if hvd.rank() else large), dtype)
        total = hvd.bind(NoCompression(), [variable], op=hvd.Sum).reduce([own])[0]
        assert total.dtype == dtype
        expected = tf.cast(tf.fill([300], large + hvd.size() - 1), dtype)
        np.testing.assert_array_equal(tf.cast(total, "float32"), tf.cast(expected, "float32"))


def ranks_run_nodes_in_one_order() -> None:
    """However many there are, between branches and loops, and with one thread to wait in."""
    variables = [tf.Variable(tf.zeros([40]), name=f"v{i}") for i in range(3)]
    schedule = TopK(StagedWarmup(densities=(1.0, 0.25, 0.05)))
    bindings = [hvd.bind(schedule, [v]) for v in variables]

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        total = tf.zeros([])
        for number, binding in enumerate(bindings):
            (mean,) = binding.reduce([tf.fill([40], x + number)])
            if tf.reduce_sum(mean) > 0:
                total += hvd.allreduce(tf.reduce_sum(mean))
            else:
                total -= hvd.allreduce(tf.ones([]))
        for _ in tf.range(3):
            total += hvd.allreduce(tf.ones([]), op=hvd.Sum)
        return total

    for number in range(4):
        found = step(tf.constant(hvd.rank() + number * 1.0))
        assert_same_everywhere({"total": found.numpy()})


def several_steps_in_one_call_of_a_graph() -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.set_weights([np.ones([4, 3]), np.zeros(3)])
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), compression="topk")
    model.compile(optimizer, "mse", steps_per_execution=3)
    optimizer.build(model.trainable_variables)  # so that the graph is traced once
    x = np.random.default_rng(hvd.rank()).standard_normal((48, 4)).astype("float32")
    model.fit(x, x[:, :3], batch_size=8, verbose=0)
    assert int(optimizer.compression.step) == 6
    assert_same_everywhere(dict(enumerate(model.get_weights())))


@applies(least=2)
def a_late_rank_is_named() -> None:
    """The error of the collective is inside of that of the graph."""
    everyone = hvd.add_process_set(range(hvd.size()))
    binding = hvd.bind(NoCompression(), [tf.Variable(tf.zeros([3]))], process_set=everyone)
    binding.reduce([tf.ones([3])])
    everyone.engine.comm.timeout = 1.0
    if hvd.rank() == 0:
        began = time.monotonic()
        with raises(tf.errors.OpError, "CollectiveTimeout", "rank 0 of", "nothing has moved"):
            binding.reduce([tf.ones([3])])
        assert time.monotonic() - began < 60
        with raises(tf.errors.OpError, "CollectiveTimeout", "is broken"):
            binding.reduce([tf.ones([3])])
        everyone.free()  # or rank 0 would leave as after an error
    barrier()


def what_cannot_work_says_what_to_write() -> None:
    for module, name in ((hvd, "join"), (hvd_keras, "elastic"), (hvd, "alltoall")):
        with raises(UnsupportedError, f"hvd.{name} needs Horovod: import hvd_compress.tensorflow"):
            getattr(module, name)
    for module in (hvd, hvd_keras):
        with raises(AttributeError, "no 'no_such_thing'"):
            _ = module.no_such_thing
        with raises(UnsupportedError, "hvd.parameter_server", "import hvd_compress.torch.mpi"):
            _ = module.parameter_server
    with raises(UnsupportedError, "op='adasum'"):
        hvd.allreduce(tf.ones([1]), op=hvd.Adasum)
    if hvd.size() == 1:
        return
    with raises(UnsupportedError, "leave algorithm out"):
        method = TopK(density=0.05, algorithm="split_allgather")
        hvd.bind(method, [tf.Variable(tf.zeros([300]))]).reduce([tf.ones([300])])
    with raises(MismatchError, "allgather of float32 rows"):
        hvd.allgather(tf.ones([2, 1 + hvd.rank()]))


def wrong_arguments_of_collectives_are_named() -> None:
    one, rows = tf.ones([1]), tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]))
    for call, *words in (
        (lambda: hvd.allreduce(object()), "tensor="),
        (lambda: hvd.allreduce(one, prescale_factor="2"), "prescale_factor"),
        (lambda: hvd.allreduce(one, average="name"), "average="),
        (lambda: hvd.allreduce(rows, op=hvd.Max), "op=hvd.Max of tf.IndexedSlices"),
        (lambda: hvd.allgather(object()), "tensor="),
        (lambda: hvd.allgather(tf.ones([2, 0])), "allgather", "element"),
        (lambda: hvd.broadcast(one, None), "root_rank=None"),
        (lambda: hvd.broadcast_variables([tf.Variable(one), one], 0), "variables.1."),
        (lambda: hvd.broadcast_object({"f": lambda: 0}, 0), "rank 0 cannot send", "'f'"),
        (lambda: hvd.allgather_object([lambda: 0]), "rank 0 cannot send"),
        (lambda: hvd.barrier(1), "process_set="),
        (lambda: hvd.init(process_sets=5), "process_sets=", "hvd.ProcessSet"),
    ):
        with raises(CompressionError, *words):
            call()
    for _ in range(20):  # ranks compare the first calls; these they always do
        hvd.barrier()
        hvd.allreduce(one)
    if hvd.size() > 1:
        last = tf.Variable(tf.ones([1 + hvd.rank()]))
        with raises(MismatchError, "variables.1.: float32.2."):
            hvd.broadcast_variables([tf.Variable(one), last], 0)
    pair = hvd.ProcessSet(range(hvd.size()))
    hvd.init(process_sets=[pair])
    assert float(hvd.allreduce(1.0, op=hvd.Sum, process_set=pair)) == hvd.size()
    hvd.remove_process_set(pair)
