"""SAM in PyTorch and Keras, beside its formula in NumPy."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

import hvd_compress.tensorflow.keras as hvd_keras
import hvd_compress.torch as hvd_torch
from hvd_compress import optimizers
from hvd_compress.errors import ConfigError

X = np.random.default_rng(0).standard_normal((16, 6))
Y = np.arange(16) % 3


class InTorch:
    """A network with statistics, whose gradients are taken at a point or beside it."""

    def __init__(self, dtype: str) -> None:
        kind = getattr(torch, dtype)
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
        ).to(kind)
        self.x, self.y = torch.tensor(X, dtype=kind), torch.tensor(Y)
        self.variables = [*self.model.parameters(), *self.model.buffers()]
        self.count = len([*self.model.parameters()])

    def values(self) -> list[np.ndarray]:
        return [v.detach().numpy().copy() for v in self.variables]

    def assign(self, values: list[np.ndarray]) -> None:
        with torch.no_grad():
            for v, value in zip(self.variables, values, strict=True):
                v.copy_(torch.tensor(value))

    def _loss(self) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.model(self.x), self.y)

    def gradients(self, sam: bool = False, **options) -> list[np.ndarray]:
        self.model.zero_grad()
        if sam:
            hvd_torch.SAM(self.model, **options).backward(self._loss)
        else:
            self._loss().backward()
        return [p.grad.numpy().copy() for p in self.model.parameters()]

    @staticmethod
    def quadratic() -> tuple[float, np.ndarray, np.ndarray]:
        w = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
        model = torch.nn.ParameterDict({"weight": w, "unused": torch.nn.Parameter(torch.ones(3))})
        sam = hvd_torch.SAM(model)
        loss = sam.backward(lambda: (torch.tensor([4.0, 1.0]) * w.square()).sum() / 2)
        assert not loss.requires_grad
        assert model["unused"].grad is None
        return loss.item(), w.grad.numpy(), w.detach().numpy()

    @staticmethod
    def of_something_else() -> None:
        other = torch.ones((), requires_grad=True)
        hvd_torch.SAM(torch.nn.Linear(2, 1)).backward(lambda: 2 * other)

    @staticmethod
    def make(**options) -> object:
        return hvd_torch.SAM(torch.nn.Linear(2, 2), **options)


class InKeras:
    """The same, whose gradients are taken in a graph."""

    def __init__(self, dtype: str) -> None:
        keras.utils.set_random_seed(0)
        self.model = keras.Sequential(
            [
                keras.Input((6,), dtype=dtype),
                keras.layers.Dense(8, dtype=dtype),
                keras.layers.BatchNormalization(dtype=dtype),
                keras.layers.Dense(3, dtype=dtype),
            ]
        )
        self.x = tf.constant(X, dtype)
        weights, self.statistics = (
            self.model.trainable_variables,
            self.model.non_trainable_variables,
        )
        self.variables, self.weights = [*weights, *self.statistics], weights
        self.count = len(weights)
        self.loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype=dtype)

    def values(self) -> list[np.ndarray]:
        return [v.numpy().copy() for v in self.variables]

    def assign(self, values: list[np.ndarray]) -> None:
        for v, value in zip(self.variables, values, strict=True):
            v.assign(value)

    def _loss(self) -> tf.Tensor:
        return self.loss_of(Y, self.model(self.x, training=True))

    def gradients(self, sam: bool = False, **options) -> list[np.ndarray]:
        if not sam:
            with tf.GradientTape() as tape:
                loss = self._loss()
            return [g.numpy() for g in tape.gradient(loss, [v.value for v in self.weights])]
        made = hvd_keras.SAM(**options)
        step = tf.function(lambda: made.gradient(self._loss, self.weights, self.statistics)[1])
        return [g.numpy() for g in step()]

    in_graph = False

    @classmethod
    def quadratic(cls) -> tuple[float, np.ndarray, np.ndarray]:
        w, unused = keras.Variable([1.0, 1.0], name="kernel"), keras.Variable([1.0])
        sam = hvd_keras.SAM()

        def step():
            def loss():
                return tf.reduce_sum(tf.constant([4.0, 1.0]) * tf.square(w.value)) / 2

            found, (gradient, other) = sam.gradient(loss, [w, unused])
            assert other is None
            return found, gradient

        found, gradient = (tf.function(step) if cls.in_graph else step)()
        return float(found), gradient.numpy(), w.numpy()

    @staticmethod
    def of_something_else() -> None:
        hvd_keras.SAM().gradient(lambda: tf.constant(1.0), [keras.Variable([1.0])])

    @staticmethod
    def make(**options) -> object:
        return hvd_keras.SAM(**options)


class InGraph(InKeras):
    in_graph = True


frameworks = pytest.mark.parametrize("framework", [InTorch, InKeras])


@pytest.mark.parametrize("framework", [InTorch, InKeras, InGraph])
def test_sharpness_by_hand(framework):
    eps = 0.0485071, 0.0121268
    loss, gradient, weights = framework.quadratic()
    assert loss == 2.5
    np.testing.assert_allclose(gradient, [4 * (1 + eps[0]), 1 + eps[1]], atol=1e-5)
    assert weights.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("average", [None, lambda x, name=None: x], ids=["own", "averaged"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@frameworks
def test_a_networks_gradient_is_that_at_the_formulas_point(framework, dtype, average):
    network = framework(dtype)
    before, count = network.values(), network.count
    found = network.gradients(True, rho=0.3, average=average)
    after = network.values()
    network.assign(before)
    first = network.gradients()
    once = network.values()
    np.testing.assert_equal(after[:count], before[:count])
    for x, y in zip(after[count:], once[count:], strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, err_msg="statistics of one pass")
    steps = optimizers.SAM(0.3).ascent(before[:count], first)
    moved = [w + eps for w, eps in zip(before[:count], steps, strict=True)]
    network.assign([*moved, *before[count:]])
    close = {"float32": (1e-3, 1e-5), "float64": (1e-12, 1e-13)}[dtype]
    for g, other in zip(found, network.gradients(), strict=True):
        np.testing.assert_allclose(g, other, *close)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"rho": 0}, "rho must be greater than 0"), ({"average": True}, "average=")],
)
@frameworks
def test_bad_options_are_errors(framework, options, words):
    with pytest.raises(ConfigError, match=words):
        framework.make(**options)


@frameworks
def test_schedules_change_the_radius(framework):
    sam = framework.make(rho=0.5)
    sam.rho = 0.1
    assert sam.formula == optimizers.SAM(0.1)
    with pytest.raises(ConfigError, match="rho must be greater than 0"):
        sam.rho = -1.0


@frameworks
def test_a_loss_of_something_else_is_an_error(framework):
    with pytest.raises(ConfigError, match="found no gradient"):
        framework.of_something_else()


# -- parameters, hooks and precisions of PyTorch -------------------------------------------------


def test_errors_and_nan_leave_weights_as_they_are():
    model = InTorch("float32").model
    before = [p.detach().clone() for p in model.parameters()]
    calls = []

    def fails_the_second_time():
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("second")
        return model(torch.ones(4, 6)).sum()

    with pytest.raises(RuntimeError, match="second"):
        hvd_torch.SAM(model).backward(fails_the_second_time)
    hvd_torch.SAM(model).backward(lambda: model(torch.full((4, 6), torch.nan)).sum())
    for p, kept in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, kept)
    assert model[0].weight.grad.isnan().all(), "the others, and loss scaling, must learn of it"


def test_half_precision_sees_the_perturbed_weights():
    """Autocast keeps copies of weights for as long as it lasts."""
    model, outside = torch.nn.Linear(6, 3), torch.nn.Linear(6, 3)
    outside.load_state_dict(model.state_dict())
    x = torch.randn(8, 6)

    def loss_of(m):
        return m(x).float().square().sum()

    with torch.autocast("cpu", torch.bfloat16):
        hvd_torch.SAM(model, rho=1.0).backward(lambda: loss_of(model))

    def in_a_context_of_its_own():
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(outside)

    hvd_torch.SAM(outside, rho=1.0).backward(in_a_context_of_its_own)
    assert torch.equal(model.weight.grad, outside.weight.grad)


def test_sparse_gradients_climb_as_dense_ones_do():
    found = []
    for is_sparse in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Embedding(9, 4, sparse=is_sparse), torch.nn.Linear(4, 1)
        )
        sam = hvd_torch.SAM(model, average=lambda x, name: x)
        sam.backward(lambda model=model: model(torch.tensor([1, 2, 2])).square().sum())
        found.append(model[0].weight.grad.to_dense())
    torch.testing.assert_close(*found)
