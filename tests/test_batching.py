"""Local work that is done for several tensors at once."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import torch

from hvd_compress import Context, PowerSGD
from hvd_compress.aggregators.power_sgd import orthonormal_rows
from hvd_compress.backends import backend_of
from hvd_compress.base import Batch
from hvd_compress.engines.batching import Traveller, answer_batches, answers
from hvd_compress.engines.lockstep import World

MAKERS = {"numpy": np.asarray, "torch": torch.tensor, "tensorflow": tf.constant}


def under_way(exchange, name="tensor"):
    traveller = Traveller(name, exchange)
    traveller.advance(None)
    return traveller


def doubling(calls):
    def double(xp, stack):
        calls.append(tuple(stack.shape))
        return stack * 2

    return double


def asking(function, x):
    return under_way((lambda: (yield Batch(function, (x,))))())


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_equal_shapes_travel_together(framework):
    calls, make = [], MAKERS[framework]
    double, other = doubling(calls), doubling(calls)
    values = [np.full(shape, i, np.float32) for i, shape in enumerate([(2, 3), (4,), (2, 3)])]
    travellers = [asking(double, make(value)) for value in values]
    travellers += [asking(other, make(values[0])), asking(double, make(values[0].astype(float)))]
    answer_batches(travellers)
    assert sorted(calls) == [(1, 2, 3), (1, 2, 3), (1, 4), (2, 2, 3)]
    for traveller, value in zip(travellers, [*values, values[0], values[0]], strict=True):
        np.testing.assert_array_equal(np.asarray(traveller.outcome), 2 * value)


def test_numpys_arrays_stay_alone():
    calls = []
    double = doubling(calls)
    answer_batches([asking(double, np.ones((2, 2))) for _ in range(3)])
    assert calls == [(1, 2, 2)] * 3


@pytest.mark.parametrize("framework", MAKERS)
def test_stacks_are_orthonormalised_like_matrices(framework):
    make = MAKERS[framework]
    matrices = np.random.default_rng(0).standard_normal((5, 3, 8))
    requests = [Batch(orthonormal_rows, (make(matrix),)) for matrix in matrices]
    for q, matrix in zip(answers(requests), matrices, strict=True):
        expected = orthonormal_rows(backend_of(matrix), matrix)
        np.testing.assert_allclose(np.asarray(q), expected, atol=1e-12)
        np.testing.assert_allclose(np.asarray(q) @ np.asarray(q).T, np.eye(3), atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"orthogonalise": "qr"}, {"alternate": True}])
@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_many_matrices_are_one_after_the_other(framework, options):
    """Layers of two shapes, in steps of one rank."""
    method = PowerSGD(rank=2, start=0, min_compression_rate=1, **options)
    random = np.random.default_rng(1)
    shapes = {"a": (12, 10), "b": (12, 10), "c": (9, 20), "d": (12, 10), "e": (300, 200)}
    world = World(method, 1)
    states = {n: method.init(MAKERS[framework](np.zeros(s))) for n, s in shapes.items()}
    for step in range(4):
        gradients = {name: random.standard_normal(shape) for name, shape in shapes.items()}
        travellers = {}
        for name, gradient in gradients.items():
            gradient = MAKERS[framework](gradient)
            exchange = method.exchange(gradient, states[name], Context(name=name, step=step))
            travellers[name] = under_way(exchange, name)
        while any(t.request is not None for t in travellers.values()):
            answer_batches(list(travellers.values()))
            for traveller in travellers.values():
                if traveller.request is not None:
                    traveller.advance(traveller.request.array)
        for name, traveller in travellers.items():
            states[name] = traveller.outcome.state
            expected = world.exchange([gradients[name]], name)[0].mean
            np.testing.assert_allclose(np.asarray(traveller.outcome.mean), expected, atol=1e-10)
