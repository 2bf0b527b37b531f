"""Gradients that pass through collectives: the numbers are those of Horovod's own functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_compress.errors import UnsupportedError
from tests.scenarios import applies
from tests.scenarios.driver import barrier, raises
from tests.scenarios.driver_tensorflow import hvd, library


def _total() -> float:
    """The sum of r + 1 over the ranks, each of which weighs its result by that."""
    return hvd.size() * (hvd.size() + 1) / 2


def _gradients(function: Callable[[tf.Tensor], Any], x: Any, weight: Any = 1.0) -> list[np.ndarray]:
    """Of this rank's number times the weighted results: eagerly, in a graph, and of a graph."""
    x = tf.convert_to_tensor(x)

    def gradient(called: Callable[[tf.Tensor], Any], x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = (hvd.rank() + 1) * tf.reduce_sum(weight * called(x))
        return tape.gradient(loss, x)

    @tf.function
    def in_graph(x: tf.Tensor) -> tf.Tensor:
        return gradient(function, x)

    found = [gradient(function, x), in_graph(x), gradient(tf.function(function), x)]
    return [tf.convert_to_tensor(x).numpy() for x in found]


def _assert_are(found: list[np.ndarray], expected: Any) -> None:
    for each in found:
        np.testing.assert_allclose(each, expected, rtol=1e-6)


def allreduce_sums_or_averages_gradients_as_it_does_tensors() -> None:
    weight = np.array([1.0, -2.0, 0.5], np.float32)
    for op, divisor in ((hvd.Sum, 1), (hvd.Average, hvd.size())):
        for scale, factors in (
            (1.0, {}),
            (0.5, {"prescale_factor": 2.0, "postscale_factor": 0.25}),
        ):
            found = _gradients(
                lambda x, op=op, factors=factors: hvd.allreduce(x, op=op, **factors),
                [hvd.rank() + 1.0, 2.0, 3.0],
                weight,
            )
            _assert_are(found, scale * _total() / divisor * weight)
    found = _gradients(
        lambda x: tf.stack(hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum)), [1.0, 2.0]
    )
    _assert_are(found, [3 * _total()] * 2)


def gradients_of_half_precision_are_sent_in_it() -> None:
    weight = np.float32(1 + 2.0**-13)  # in half precision 1
    for compression in (hvd.Compression.fp16, hvd.FP16):
        found = _gradients(
            lambda x, c=compression: hvd.allreduce(x, op=hvd.Sum, compression=c),
            [1.0, 2.0],
            weight,
        )
        _assert_are(found, [_total()] * 2)
    found = _gradients(
        lambda x: hvd.allreduce(x, op=hvd.Average, compression=hvd.NoCompression()), [1.0, 2.0]
    )
    _assert_are(found, [_total() / hvd.size()] * 2)


def a_method_that_sends_less_than_all_has_no_gradient() -> None:
    def loss(x: tf.Tensor) -> tf.Tensor:
        method = hvd.TopK(density=0.5, error_feedback=False)
        return hvd.allreduce(x, op=hvd.Sum, compression=method)

    np.testing.assert_array_equal(loss(tf.constant([1.0, 2.0])), [0.0, 2.0 * hvd.size()])
    with raises(UnsupportedError, "topk", "stop_gradient"):
        _gradients(loss, [1.0, 2.0])


def a_gradient_that_depends_on_the_result() -> None:
    """And the gradient of the gradient, for which all ranks meet again."""
    x = tf.constant([hvd.rank() + 1.0])
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            loss = tf.reduce_sum(hvd.allreduce(x, op=hvd.Sum) ** 2 / 2)
        first = inner.gradient(loss, x)
    np.testing.assert_allclose(first, [hvd.size() * _total()])
    np.testing.assert_allclose(outer.gradient(first, x), [hvd.size() ** 2])


def allgather_returns_each_rank_the_mean_of_its_rows() -> None:
    """Over MPI the first rank has none; TensorFlow leaves Horovod's gradients of nothing out of a
    graph, and the other ranks would wait."""
    rank, size, more = hvd.rank(), hvd.size(), int(library != "mpi")
    ends = np.cumsum([r + more for r in range(size)])
    weight = np.arange(2.0 * ends[-1], dtype=np.float32).reshape(-1, 2)
    x = np.full((rank + more, 2), rank, np.float32)
    found = _gradients(hvd.allgather, x, weight)
    _assert_are(found, (size + 1) / 2 * weight[ends[rank] - len(x) : ends[rank]])
    # What only looks some rows up has a sparse gradient.
    found = _gradients(lambda x: tf.gather(hvd.allgather(x), [0]), np.full((1, 2), rank, "f4"))
    _assert_are(found, [[(size + 1) / 2 * (rank == 0)] * 2])


def broadcast_returns_the_root_the_mean() -> None:
    rank, size = hvd.rank(), hvd.size()
    for root in {0, size - 1}:
        found = _gradients(
            lambda x, root=root: hvd.broadcast(x, root), [rank + 1.0, 5.0], [1.0, 3.0]
        )
        _assert_are(found, (size + 1) / 2 * np.array([1.0, 3.0]) * (rank == root))


@applies(least=2)  # a set needs somebody outside
def gradients_stay_in_the_process_set() -> None:
    last = hvd.size() - 1
    sets = [hvd.add_process_set(ranks) for ranks in (list(range(last)), [last])]
    subset = sets[hvd.rank() == last]
    rank, size = subset.rank(), subset.size()
    mean = sum(r + 1 for r in range(hvd.size()) if (r == last) == (hvd.rank() == last)) / size
    found = _gradients(lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=subset), [1.0])
    _assert_are(found, [size * mean])
    weight = np.arange(1.0, size + 1.0, dtype=np.float32)[:, None]
    found = _gradients(lambda x: hvd.allgather(x, process_set=subset), [[1.0]], weight)
    _assert_are(found, [[mean * (rank + 1)]])
    root = hvd.rank() - rank + size - 1
    found = _gradients(lambda x: hvd.broadcast(x, root, process_set=subset), [1.0])
    _assert_are(found, [mean * (hvd.rank() == root)])
    barrier()
    for each in sets:
        hvd.remove_process_set(each)


def the_maximum_has_no_gradient() -> None:
    """Horovod's is the largest of the gradients, which is not that of the maximum."""
    if library == "mpi":
        with raises(UnsupportedError, "op=hvd.Max has no gradient", "stop_gradient"):
            _gradients(lambda x: hvd.allreduce(x, op=hvd.Max), [1.0])
    else:
        found = _gradients(lambda x: hvd.allreduce(x, op=hvd.Max), [1.0])
        _assert_are(found, [hvd.size()])
