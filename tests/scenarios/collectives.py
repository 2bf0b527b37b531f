"""Gradients that pass through collectives: the numbers are those of Horovod's own functions."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvd_compress.errors import UnsupportedError
from tests.scenarios import applies
from tests.scenarios.driver import barrier, gradients_through, hvd, is_mpi, raises, second_gradient

#: the sum of r + 1 over the ranks, each of which weighs its result by that
TOTAL = hvd.size() * (hvd.size() + 1) / 2


def _assert_are(function: Any, x: Any, weight: Any, expected: Any, **options: Any) -> None:
    """Gradients of this rank's number times the weighted results, in each way to have them."""
    found = gradients_through(lambda x: function(x, **options), x, (hvd.rank() + 1) * weight)
    for each in found:
        np.testing.assert_allclose(each, expected, rtol=1e-6)


def allreduce_sums_or_averages_gradients_as_it_does_tensors() -> None:
    weight, x = np.array([1.0, -2.0, 0.5], np.float32), [hvd.rank() + 1.0, 2.0, 3.0]
    factors = {"prescale_factor": 2.0, "postscale_factor": 0.25}
    for op, divisor in ((hvd.Sum, 1), (hvd.Average, hvd.size())):
        expected = TOTAL / divisor * weight
        _assert_are(hvd.allreduce, x, weight, expected, op=op)
        _assert_are(hvd.allreduce, x, weight, expected / 2, op=op, **factors)


def gradients_of_half_precision_are_sent_in_it() -> None:
    weight = np.float32(1 + 2.0**-13)  # in half precision 1
    options = {"op": hvd.Sum, "compression": hvd.Compression.fp16}
    _assert_are(hvd.allreduce, [1.0, 2.0], weight, [TOTAL] * 2, **options)


def a_gradient_that_depends_on_the_result() -> None:
    """And the gradient of the gradient, for which all ranks meet again."""
    first, second = second_gradient(
        lambda x: hvd.allreduce(x, op=hvd.Sum) ** 2 / 2, [hvd.rank() + 1.0]
    )
    np.testing.assert_allclose(first, [hvd.size() * TOTAL])
    np.testing.assert_allclose(second, [float(hvd.size() ** 2)])


def allgather_returns_each_rank_the_mean_of_its_rows() -> None:
    """Ranks have as many rows as their number says, and one more under Horovod: TensorFlow leaves
    gradients of nothing out of a graph, and the other ranks would wait."""
    rank, size, more = hvd.rank(), hvd.size(), int(not is_mpi)
    ends = np.cumsum([r + more for r in range(size)])
    weight = np.arange(2.0 * ends[-1], dtype=np.float32).reshape(-1, 2)
    x = np.full((rank + more, 2), rank, np.float32)
    expected = (size + 1) / 2 * weight[ends[rank] - len(x) : ends[rank]]
    _assert_are(hvd.allgather, x, weight, expected)


def broadcast_returns_the_root_the_mean() -> None:
    mean = (hvd.size() + 1) / 2 * np.array([1.0, 3.0], np.float32)
    for root in {0, hvd.size() - 1}:
        expected = mean * (hvd.rank() == root)
        weight = np.array([1.0, 3.0], np.float32)
        _assert_are(hvd.broadcast, [hvd.rank() + 1.0, 5.0], weight, expected, root_rank=root)


@applies(least=2)  # a set needs somebody outside; sizes 2 and more run this
def gradients_stay_in_the_process_set() -> None:
    """All but the last rank, and the last: Horovod counts calls that have no name, so all ranks
    make as many."""
    last, one = hvd.size() - 1, np.float32(1)
    sets = [hvd.add_process_set(ranks) for ranks in (list(range(last)), [last])]
    subset = sets[hvd.rank() == last]
    rank, size = subset.rank(), subset.size()
    mean = sum(r + 1 for r in range(hvd.size()) if (r == last) == (hvd.rank() == last)) / size
    options = {"process_set": subset}
    for op, expected in ((hvd.Sum, size * mean), (hvd.Average, mean)):
        _assert_are(hvd.allreduce, [1.0], one, [expected], op=op, **options)
    # Ranks have one row more than their number says.
    rows, first = np.ones((rank + 1, 1), np.float32), rank * (rank + 1) // 2
    weight = np.arange(1.0, size * (size + 1) // 2 + 1, dtype=np.float32)[:, None]
    own = weight[first : first + rank + 1]
    _assert_are(hvd.allgather, rows, weight, mean * own, **options)
    root = hvd.rank() - rank + size - 1
    expected = [mean * (hvd.rank() == root)]
    _assert_are(hvd.broadcast, [1.0], one, expected, root_rank=root, **options)
    barrier()
    for each in sets:
        hvd.remove_process_set(each)


def the_maximum_has_no_gradient() -> None:
    """Horovod's is the largest of the gradients, which is not that of the maximum."""
    options = {"op": hvd.Max}
    if is_mpi:
        with raises(UnsupportedError, "op=hvd.Max has no gradient", "detach|stop_gradient"):
            _assert_are(hvd.allreduce, [hvd.rank() + 1.0], np.float32(1), None, **options)
    else:
        _assert_are(hvd.allreduce, [hvd.rank() + 1.0], np.float32(1), [hvd.size()], **options)
