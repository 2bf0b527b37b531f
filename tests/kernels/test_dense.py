"""Sums of whole buckets: whose memory is whose while an exchange is under way."""

from __future__ import annotations

import math
import weakref

import numpy as np
import pytest
import torch

from hvd_compress import Context
from hvd_compress.base import Spec, Tensors
from hvd_compress.engines.named import NamedEngine
from hvd_compress.fused.dense import FusedSum
from hvd_compress.transforms import momentum_after_averaging


def reply_to(request):
    """The sum, with a second rank's tens, where an engine would make it."""
    total = request.array if request.owned else request.array.copy()
    total += 10
    return total


def outcome_of(exchange, reply):
    with pytest.raises(StopIteration) as stop:
        exchange.send(reply)
    return stop.value.value


def exchange_of(gradients, tensors, momentum=None, wire=None, **step):
    step = Context(**step)
    specs = [Spec(str(i), x.shape, math.prod(x.shape), x) for i, x in enumerate(gradients)]
    plan = FusedSum((), momentum, False, wire, None).plan(specs, None, step)
    return plan.exchange(tensors, step)


def test_what_was_sent_is_not_where_the_sum_is_made():
    gradients = [np.ones(3, np.float32), np.full(2, 2, np.float32)]
    exchange = exchange_of(gradients, Tensors(gradients, [{}, {}], "", [0.0, 0.0]), size=2)
    found = outcome_of(exchange, reply_to(next(exchange)))
    for x, n, mean in zip(gradients, (1, 2), found.directions, strict=True):
        np.testing.assert_array_equal(x, np.full_like(x, n))
        np.testing.assert_array_equal(mean, (x + 10) / 2)


@pytest.mark.parametrize("momentum", [None, momentum_after_averaging(0.9)])
def test_a_gradient_may_get_other_strides_meanwhile(momentum):
    gradients = [torch.arange(12.0).reshape(3, 4), torch.ones(2)]
    expected = [x.clone() for x in gradients]
    states = [{"velocity": torch.zeros(12)}, {"velocity": torch.zeros(2)}]
    tensors = Tensors(gradients, states, "", [0.9, 0.9])
    exchange = exchange_of(gradients, tensors, momentum, in_place=True)
    request = next(exchange)
    gradients[0].data = torch.zeros(4, 3).t()
    directions = outcome_of(exchange, request.array).directions
    torch.testing.assert_close([*directions], expected, rtol=0, atol=0)


class ThreeAlike(NamedEngine):
    """One of three ranks that do the same."""

    rank, size = 0, 3

    def _launch(self, op):
        return op

    def _wait(self, op):
        return op.tensor + op.tensor + op.tensor

    def _splits(self, sizes):
        return np.array(sizes)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("array", "wire"),
    [(np.array, "float16"), (torch.tensor, "float16"), (torch.tensor, "bfloat16")],
)
def test_a_rounded_sum_is_divided_in_the_dtype_of_the_gradients(array, wire, dtype):
    numbers = np.random.default_rng(0).standard_normal(100).astype(dtype)
    found = []
    for in_place in (True, False):
        gradients = [array(numbers[:60].reshape(6, 10)), array(numbers[60:])]
        tensors = Tensors(gradients, [{}, {}], "", [0.0, 0.0])
        exchange = exchange_of(gradients, tensors, wire=wire, size=3, in_place=in_place)
        found.append([*ThreeAlike().run("bucket", exchange).directions])
    for x, expected in zip(*found, strict=True):
        np.testing.assert_array_equal(x, expected)
        assert x.dtype == expected.dtype


def test_what_was_rounded_is_all_that_is_kept_under_way():
    gradients = [torch.ones(3, 4), torch.ones(5)]
    tensors = Tensors(gradients, [{}, {}], "", [0.0, 0.0])
    wide = []

    def watched(exchange):
        request = next(exchange)
        wide.append(weakref.ref(request.array))
        reply = yield request
        return outcome_of(exchange, reply)

    exchange = exchange_of(gradients, tensors, wire="float16", size=3, in_place=True)
    engine = ThreeAlike()
    engine.start("bucket", watched(exchange))
    assert wide[0]() is None
    assert engine.finish()["bucket"].directions is gradients
    np.testing.assert_array_equal(gradients[0], np.ones((3, 4)))
