"""Sums of whole buckets: whose memory is whose while an exchange is under way."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hvd_compress import Context
from hvd_compress.chain import Repeated
from hvd_compress.fused.dense import FusedSum, Tensor, _key
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


def test_what_was_sent_is_not_where_the_sum_is_made():
    gradients = [np.ones(3, np.float32), np.full(2, 2, np.float32)]
    exchange = FusedSum((), None, False, None, None, 2)(
        [Tensor(x, x, {}, 0.0, {}) for x in gradients]
    )
    outcomes = outcome_of(exchange, reply_to(next(exchange)))
    for x, outcome in zip(gradients, outcomes, strict=True):
        np.testing.assert_array_equal(outcome.sent, x)
        np.testing.assert_array_equal(outcome.mean, (x + 10) / 2)


@pytest.mark.parametrize("momentum", [None, momentum_after_averaging(0.9)])
def test_a_gradient_may_get_other_strides_meanwhile(momentum):
    form = FusedSum((), momentum, False, None, None, 1)
    gradients = [torch.arange(12.0).reshape(3, 4), torch.ones(2)]
    expected = [x.clone() for x in gradients]
    states = [{"velocity": torch.zeros(12)}, {"velocity": torch.zeros(2)}]
    tensors = Repeated(gradients, states, "", [0.9, 0.9], (12, 2), {})
    exchange = form.again(tensors, _key(gradients[0]), Context())
    request = next(exchange)
    gradients[0].data = torch.zeros(4, 3).t()
    directions, _ = outcome_of(exchange, request.array)
    for found, x in zip(directions, expected, strict=True):
        assert torch.equal(found, x)
