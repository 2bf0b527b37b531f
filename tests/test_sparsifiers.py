"""Operators and methods that send a part of a tensor, chosen by thresholds: by hand, by their laws,
against sorting, and the bytes that they send."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tensorflow as tf
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hvd_compress import (
    ConfigError,
    Context,
    Threshold,
    plus_minus,
    threshold,
)
from hvd_compress.backend import backend_of
from hvd_compress.base import Gather
from hvd_compress.lockstep import World

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
    outcome = World(Threshold(tau=4), 1).exchange([WORKED])[0]
    assert outcome.mean.tolist() == [0, 0, 4]
    assert outcome.state["residual"].tolist() == [3, -4, 8]


def test_values_leave_nothing():
    outcome = World(Threshold(tau=4, send="value"), 1).exchange([WORKED])[0]
    assert outcome.mean.tolist() == [0, 0, 12]
    assert outcome.state["residual"].tolist() == [3, -4, 0]


def test_large_elements_are_sent_in_instalments():
    world = World(Threshold(tau=4), 2)
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
        (Threshold(tau=1), 5 * 4 + 1),  # a bit a value
        (Threshold(tau=1, send="value"), 5 * (4 + 4)),
        (Threshold(tau=7), 0),
    ):
        request = payload_of(method, x)
        assert request.payload.size == 16 + body + -body % 8
        assert not request.equal_sizes


def test_a_codec_of_one_number():
    code = plus_minus(0.3).encode(WORKED, np.random.default_rng(0))
    assert code.tolist() == [0b101]
    decoded = plus_minus(0.3).decode(code, 3, np.dtype("float32"))
    np.testing.assert_array_equal(decoded, np.float32([0.3, -0.3, 0.3]))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Threshold(tau=0), "tau must be"),
        (lambda: Threshold(tau=True), "tau must be"),
        (lambda: Threshold(send="bits"), "send must be"),
        (lambda: threshold(float("nan")), "tau must be"),
        (lambda: plus_minus(-1), "tau must be"),
    ],
)
def test_bad_options_are_errors(make, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        make()
