"""DeMo's messages: a case by hand, the transform, chunks, and exchanges beside the formulas.

The optimizers run in real jobs: ``scenarios/optimizers.py``.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import tensorflow as tf
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hvd_compress import ConfigError, Context, DeMoCompression
from hvd_compress.blocks import chain, dct_top_k, momentum_correction, momentum_feedback
from hvd_compress.engines.base import watched
from hvd_compress.engines.lockstep import World, run
from hvd_compress.meetings.cosines import Chunks, chunks_of, dct_matrix, inverse, transform
from hvd_compress.operators.top_k import largest_of_rows
from hvd_compress.torch import DeMo as TorchDeMo
from tests.demo_reference import DeMo

LR = 0.1
BY_HAND = [np.array([1.0, 2, 3, 5]), np.array([2.0, -1, 0, 1])]


def test_three_steps_by_hand():
    """A chunk of 4, one coefficient a rank, the same gradients in every step."""
    world, plain = (
        World(DeMoCompression(0.9, 4, 1, sign=sign, indices="int32"), 2) for sign in (True, False)
    )
    w = np.zeros(4)
    decoded = [(0.375, 0.175, 0.175, 0.375)] * 2 + [(-0.375032, -0.075969, 0.346969, 0.646032)]
    weights = [(-0.1,) * 4, (-0.2,) * 4, (-0.1, -0.1, -0.3, -0.3)]
    for q, expected in zip(decoded, weights, strict=True):
        outcomes = world.exchange([g.copy() for g in BY_HAND])
        w = w - LR * outcomes[0].direction
        np.testing.assert_allclose(w, expected, atol=1e-12)
        [outcome, _] = plain.exchange([g.copy() for g in BY_HAND])
        np.testing.assert_allclose(LR * outcome.direction, q, atol=1e-6)
    for outcome, momentum in zip(
        outcomes,
        [(0.311282, 0.283219, 0.131281, 0.374218), (0.2355, -0.2355, 0.0355, -0.0355)],
        strict=True,
    ):
        np.testing.assert_allclose(LR * outcome.state["momentum"], momentum, atol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 3, 64])
def test_the_transform_is_orthonormal(n):
    matrix = dct_matrix(n)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(n), atol=1e-14)
    constant = matrix @ np.ones(n)
    np.testing.assert_allclose(constant, np.sqrt(n) * np.eye(n)[0], atol=1e-13)


@pytest.mark.parametrize(
    ("shape", "side", "chunks"),
    [
        ((), 64, Chunks(1, 1, 1, 1)),
        ((0,), 64, Chunks(1, 0, 1, 1)),
        ((3, 0), 64, Chunks(3, 0, 3, 1)),
        ((100,), 64, Chunks(1, 100, 1, 50)),
        ((67,), 64, Chunks(1, 67, 1, 1)),
        ((512, 2000), 64, Chunks(512, 2000, 64, 50)),
        ((64, 32, 3, 3), 64, Chunks(64, 288, 64, 48)),  # PyTorch's convolution
        ((3, 3, 32, 64), 64, Chunks(288, 64, 48, 64)),  # and that of Keras
    ],
)
def test_chunks_by_hand(shape, side, chunks):
    assert chunks_of(shape, side) == chunks


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy, tf.convert_to_tensor])
@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (1, 8), (9, 1), (3, 4, 5)])
def test_coefficients_are_those_of_the_chunks(make, shape):
    x = np.random.default_rng(0).normal(size=shape)
    n, m, height, width = chunks = chunks_of(shape, 5)
    found = np.asarray(transform(make(x.reshape(-1)), chunks))
    assert found.shape == (chunks.number, chunks.size)
    at = 0
    for i in range(0, n, height):
        for j in range(0, m, width):
            part = x.reshape(n, m)[i : i + height, j : j + width]
            expected = dct_matrix(height) @ part @ dct_matrix(width).T
            np.testing.assert_allclose(found[at], expected.T.reshape(-1), atol=1e-13)
            at += 1
    np.testing.assert_allclose(inverse(make(found.reshape(-1)), chunks), x.reshape(-1), atol=1e-13)


@given(
    hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.integers(1, 9)),
        elements=st.integers(0, 3).map(float),
    ),
    st.data(),
)
def test_largest_of_rows(x, data):
    k = data.draw(st.integers(1, x.shape[1]))
    order = np.sort(np.argsort(-x, axis=1, kind="stable")[:, :k])  # of equal ones the first
    expected = (order + x.shape[1] * np.arange(len(x))[:, None]).reshape(-1).tolist()
    for make in (np.asarray, torch.from_numpy, tf.convert_to_tensor):
        assert np.asarray(largest_of_rows(make(x), k)).tolist() == expected


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy, tf.convert_to_tensor])
def test_as_many_are_chosen_of_nan(make):
    x = np.full((3, 5), np.nan, np.float32)
    x[1] = np.inf
    found = np.asarray(largest_of_rows(make(x), 2)).reshape(3, 2)
    assert (found // 5 == np.arange(3)[:, None]).all()


@pytest.mark.parametrize("sign", [True, False])
@pytest.mark.parametrize("shape", [(40, 24), (24,), (7, 13)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_exchanges_follow_the_formulas(ranks, shape, sign):
    random = np.random.default_rng(ranks)
    options = {"decay": 0.9, "chunk": 8, "top_k": 3, "sign": sign}
    world, reference = World(DeMoCompression(**options), ranks), DeMo(shape, ranks, **options)
    for _ in range(12):
        gradients = random.normal(size=(ranks, *shape))
        outcomes = world.exchange(list(gradients))
        expected = reference.step(list(gradients))
        np.testing.assert_allclose(outcomes[0].direction, expected, atol=1e-6)
        for outcome, momentum in zip(outcomes, reference.momenta, strict=True):
            np.testing.assert_allclose(outcome.state["momentum"], momentum.reshape(-1), atol=1e-6)
        assert all((o.direction == outcomes[0].direction).all() for o in outcomes)


def test_nothing_is_lost():
    """What was in the momentum, faded, and the gradient: sent, or in the momentum."""
    world = World(DeMoCompression(chunk=10, top_k=2, values="float16"), 3)
    random, before = np.random.default_rng(0), np.zeros((3, 600))
    for _ in range(4):
        gradients = random.normal(size=(3, 20, 30))
        outcomes = world.exchange(list(gradients))
        sent = np.array([o.sent for o in outcomes])
        after = np.array([o.state["momentum"] for o in outcomes])
        entered = 0.999 * before + gradients.reshape(3, -1)
        np.testing.assert_allclose(sent + after, entered, rtol=0, atol=1e-15)
        np.testing.assert_allclose(outcomes[0].mean.reshape(-1), sent.mean(0), atol=1e-12)
        assert 0.01 < np.square(sent).sum() / np.square(entered).sum() < 0.3
        before = after


def test_what_one_rank_sends_counts_in_full():
    """Of four ranks one has a gradient; zeros that others send of the same chunk count nothing."""
    first = np.random.default_rng(0).normal(size=(8, 8))
    world = World(DeMoCompression(chunk=8, top_k=1, sign=False), 4)
    outcome = world.exchange([first, *np.zeros((3, 8, 8))])[0]
    alone = World(DeMoCompression(chunk=8, top_k=1, sign=False), 1).exchange([first])[0]
    assert np.abs(alone.direction).max() > 0
    np.testing.assert_allclose(outcome.direction, alone.direction, atol=1e-12)
    np.testing.assert_allclose(4 * outcome.mean, alone.mean, atol=1e-12)


def sent_by(method: DeMoCompression, shape: tuple[int, ...]) -> tuple[int, str]:
    """Bytes of a rank's message, and its kind."""
    x, seen = np.random.default_rng(0).normal(size=shape).astype(np.float32), []
    exchange = method.exchange(x, method.init(x), Context())
    run([watched(exchange, lambda request, _: seen.append(request))])
    [request] = seen
    return request.nbytes, type(request).__name__


def test_bytes_on_the_wire():
    # 16 chunks of 64 x 64 elements: a header of 16 bytes, values, indices.
    values = 16 * 32 * 4
    assert sent_by(DeMoCompression(indices="int32"), (256, 256)) == (16 + 2 * values, "Gather")
    half = sent_by(DeMoCompression(indices="int32", values="float16"), (256, 256))
    assert half == (16 + values // 2 + values, "Gather")
    count, _ = sent_by(DeMoCompression(), (256, 256))
    bits = 8 * (count - 16 - 8 - values) / (16 * 32)  # its size goes ahead of it
    assert 8 < bits < 8.7, "about log2(128) + 1.5 bits an index"
    # All that fits into a message of coefficients, and no more, is summed whole.
    assert sent_by(DeMoCompression(), (8, 4)) == (128, "Sum")
    assert sent_by(DeMoCompression(), (67,)) == (268, "Sum")
    assert sent_by(DeMoCompression(), (64,))[1] == "Gather"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DeMoCompression(decay=1.0), "decay must be a number in [0, 1)"),
        (lambda: DeMoCompression(chunk=0), "chunk must be a whole number"),
        (lambda: DeMoCompression(top_k=2.5), "top_k must be a whole number"),
        (lambda: DeMoCompression(top_k=True), "top_k must be a whole number"),
        (lambda: DeMoCompression(sign="yes"), "sign must be one of"),
        (lambda: DeMoCompression(values="int8"), "values must be one of"),
        (lambda: DeMoCompression(indices="int64"), "indices must be one of"),
        (lambda: chain(momentum_feedback(), momentum_correction(), via=dct_top_k()), "must stand"),
    ],
)
def test_bad_options_are_errors(make, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        make()


def test_without_its_compression_there_is_no_step():
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    with pytest.raises(ConfigError, match=re.escape("compression=demo.compressor()")):
        TorchDeMo([p]).step()
