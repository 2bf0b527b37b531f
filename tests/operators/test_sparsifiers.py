"""Operators and methods that send a part of a tensor, chosen by thresholds: by hand, by their laws,
against sorting, and the bytes that they send."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hvd_compress import (
    Context,
    ScaleCom,
    Threshold,
)
from hvd_compress.backends import backend_of
from hvd_compress.blocks import (
    chain,
    leader_top_k,
    plus_minus,
    threshold,
)
from hvd_compress.engines.lockstep import World
from hvd_compress.errors import PayloadError
from hvd_compress.requests import Gather, Sum

WORKED = np.array([3, -4, 12], np.float32)
RANDOM = np.random.default_rng(11)
NORMAL = RANDOM.normal(size=20_000).astype(np.float32)

vectors = arrays(
    np.float32,
    st.integers(1, 60),
    elements=st.one_of(st.integers(-3, 3).map(float), st.floats(-9, 9, width=32)),
)


def picks(operator, x, k=None, **context):
    """The same in every framework."""
    x = np.asarray(x)
    found = [
        backend_of(array).to_numpy(operator.select(array, k, Context(**context)))
        for array in (x, torch.from_numpy(x.copy()), tf.constant(x))
    ]
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)
    assert {indices.dtype for indices in found} == {np.dtype("int64")}
    assert (np.diff(found[0]) > 0).all()
    return found[0].tolist()


def payload_of(method, gradient):
    """The first message of a rank."""
    request = next(method.exchange(gradient, method.init(gradient), Context(size=2)))
    assert isinstance(request, Gather)
    return request


# -- a fixed threshold -------------------------------------------------------------------------


def test_threshold_by_hand():
    assert picks(threshold(4), WORKED) == [2]  # 4 itself is not beyond 4
    assert picks(threshold(3.5), WORKED) == [1, 2]
    assert picks(threshold(4), -WORKED) == [2]
    assert picks(threshold(12), WORKED) == []
    assert picks(threshold(4), np.array([1, np.nan, 5, -np.inf], np.float32)) == [1, 2, 3]


def test_signs_times_tau_leave_the_rest():
    outcome = World(Threshold(tau=4, send="sign"), 1).exchange([WORKED])[0]
    assert outcome.mean.tolist() == [0, 0, 4]
    assert outcome.state["residual"].tolist() == [3, -4, 8]


def test_values_leave_nothing():
    outcome = World(Threshold(tau=4), 1).exchange([WORKED])[0]
    assert outcome.mean.tolist() == [0, 0, 12]
    assert outcome.state["residual"].tolist() == [3, -4, 0]


def test_large_elements_are_sent_in_instalments():
    world = World(Threshold(tau=4, send="sign"), 2)
    means = [world.exchange([WORKED, 0 * WORKED])[0].mean.tolist()]
    means += [world.exchange([0 * WORKED] * 2)[0].mean.tolist() for _ in range(2)]
    assert means == [[0, 0, 2], [0, 0, 2], [0, 0, 0]]  # 12 - 4 - 4 is not beyond 4
    # Ranks differ in what they send, and in how many elements that are.
    assert world.exchange([0 * WORKED, -3 * WORKED])[1].mean.tolist() == [-2, 2, -2]


@given(vectors, st.sampled_from((0.25, 1.0, 2.5)))
def test_all_beyond_the_threshold_and_no_others(x, tau):
    chosen = np.isin(np.arange(x.size), threshold(tau).select(x, None, Context()))
    np.testing.assert_array_equal(chosen, np.abs(x) > tau)


def test_bytes_of_threshold():
    x = np.zeros(1000, np.float32)
    x[[3, 500, 700, 701, 999]] = [2, -3, 4, -5, 6]
    for method, body in (
        (Threshold(tau=1, send="sign"), 8 + 1),  # a packed index and a bit a value
        (Threshold(tau=1), 8 + 5 * 4),
        (Threshold(tau=7), 0),
    ):
        request = payload_of(method, x)
        assert request.payload.size == 16 + body + -body % 8
        assert not request.equal_sizes


@pytest.mark.parametrize("send", ["sign", "value"])
def test_no_more_than_dense(send):
    """If all elements are beyond the threshold, or all but some."""
    for x in (NORMAL + 10, np.where(np.arange(NORMAL.size) % 10, NORMAL + 10, 0)):
        method = Threshold(tau=1, send=send)
        assert payload_of(method, x).payload.size <= 16 + NORMAL.nbytes
        outcome, other = World(method, 2).exchange([x, np.zeros_like(x)])
        np.testing.assert_array_equal(outcome.mean, other.mean)
        expected = x / 2 if send == "value" else np.sign(x) / 2
        np.testing.assert_array_equal(outcome.mean, expected)


def test_a_codec_of_one_number():
    code = plus_minus(0.3).encode(WORKED, np.random.default_rng(0))
    assert code.tolist() == [0b101]
    decoded = plus_minus(0.3).decode(code, 3, np.dtype("float32"))
    np.testing.assert_array_equal(decoded, np.float32([0.3, -0.3, 0.3]))


# -- what one rank chooses ---------------------------------------------------------------------


def test_the_leader_chooses_by_hand():
    a, b = np.array([5.0, 1]), np.array([1.0, 4])
    world = World(ScaleCom(density=0.5), 2)
    first = world.exchange([a, b])
    assert first[0].mean.tolist() == [3, 0]
    assert [outcome.state["residual"].tolist() for outcome in first] == [[0, 1], [0, 4]]
    second = world.exchange([a, b])  # a is (5, 2) now, b is (1, 8), and b leads
    assert second[0].mean.tolist() == [0, 5]
    assert [outcome.state["residual"].tolist() for outcome in second] == [[5, 0], [1, 0]]


def test_ranks_take_turns_in_every_framework():
    gradients = np.random.default_rng(5).normal(size=(3, 40)).astype(np.float32)
    for make in (np.array, torch.from_numpy, tf.constant):
        world = World(chain(via=leader_top_k(0.1)), 3)
        for step in range(4):
            outcome = world.exchange([make(g) for g in gradients])[0]
            xp = backend_of(outcome.mean)
            expected = np.sort(np.argsort(-np.abs(gradients[step % 3]))[:4])
            np.testing.assert_array_equal(xp.to_numpy(outcome.sent.indices), expected)


def test_the_step_may_be_a_symbol():
    """The leader is found out when the graph runs."""
    gradient = np.random.default_rng(6).normal(size=100).astype(np.float32)
    via = leader_top_k(0.05)

    @tf.function
    def aggregate(x, step):
        exchange = via.aggregate(x, {}, Context(size=2, rank=1, step=step))
        request = next(exchange)
        theirs = tf.zeros(0, tf.uint8)
        frames = [theirs, request.payload]
        request = exchange.send(frames)
        return frames[1], request.array

    frame, values = aggregate(tf.constant(gradient), tf.constant(3, tf.int64))
    assert frame.shape == (16 + 8,)  # five indices, packed
    best = np.sort(np.argsort(-np.abs(gradient))[:5])
    np.testing.assert_array_equal(values.numpy(), gradient[best])


def test_bytes_of_scalecom():
    gradient = NORMAL[:1000]
    method = ScaleCom(density=0.01)
    for rank, size in ((0, 0), (1, 16 + 16), (2, 0)):  # ten indices, packed
        context = Context(rank=rank, size=3, step=4)
        exchange = method.exchange(gradient, method.init(gradient), context)
        request = next(exchange)
        assert (request.payload.size, request.equal_sizes) == (size, False)
        if rank == 1:
            frame = request.payload
            request = exchange.send([frame[:0], frame, frame[:0]])
            assert isinstance(request, Sum)
            assert request.array.size == 10


def test_ranks_that_count_steps_differently_are_noticed():
    method, gradient = ScaleCom(density=0.01), NORMAL[:1000]

    def begin(rank, step):
        exchange = method.exchange(
            gradient, method.init(gradient), Context(rank=rank, size=2, step=step)
        )
        return exchange, next(exchange).payload

    (here, mine), (_, theirs) = begin(0, 0), begin(1, 1)
    with pytest.raises(PayloadError, match="takes itself for the leader"):
        here.send([mine, theirs])
    (here, mine), (_, theirs) = begin(1, 0), begin(0, 1)
    with pytest.raises(PayloadError, match="less than a header"):
        here.send([theirs, mine])
