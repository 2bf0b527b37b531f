"""PowerSGD: cases by hand, laws of the power method, sizes of the paper, and PyTorch's own hook."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hvd_compress import ConfigError, Context, PowerSGD
from hvd_compress.advisor.shapes import Shapes, linear, norm, ptb_lstm
from hvd_compress.backends import backend_of
from hvd_compress.blocks import chain, error_feedback, power_sgd
from hvd_compress.engines.joining import alone
from hvd_compress.engines.lockstep import World, run
from hvd_compress.meetings.factors import orthonormal_rows
from hvd_compress.requests import Sum

M = np.array([[3.0, 0.0], [0.0, 1.0]])


def world_from(factor, size: int = 1, **options) -> World:
    world = World(chain(via=power_sgd(**options)), size)
    world.states["tensor"] = [{"factor": np.array(factor, float)} for _ in range(size)]
    return world


def test_one_step_by_hand():
    world = world_from([1, 1])
    [outcome] = world.exchange([M])
    np.testing.assert_allclose(outcome.mean, [[2.7, 0.3], [0.9, 0.1]], rtol=1e-12)
    np.testing.assert_allclose(outcome.state["factor"], np.array([9, 1]) / 10**0.5, rtol=1e-12)
    assert np.square(M - outcome.mean).sum() == pytest.approx(1.8)


def test_warm_starts_are_a_power_iteration():
    world = world_from([1, 1])
    errors = [np.square(M - world.exchange([M])[0].mean).sum() for _ in range(6)]
    assert errors[1:4] == pytest.approx([1.0109589, 1.0001354781, 1.0000016726], abs=1e-7)
    excess = np.array(errors) - 1  # over the best of rank 1
    np.testing.assert_allclose(excess[2:] / excess[1:-1], 1 / 81, rtol=0.02)


def test_cold_starts_draw_a_new_factor_every_step():
    """The error is that of one step of the power method from a random start, and never shrinks."""
    method = chain(via=power_sgd(warm_start=False))
    world = World(method, 2)
    errors = [np.square(M - world.exchange([M, M])[0].mean).sum() for _ in range(20)]
    assert len(set(errors)) == 20
    assert max(errors) < 10
    assert max(errors[10:]) > 1.001  # the best of rank 1 has 1
    assert world.states["tensor"] == [{}, {}]
    others = [World(method, 2, seed=1), World(method, 2)]
    again = [[np.square(M - w.exchange([M, M])[0].mean).sum() for _ in range(3)] for w in others]
    assert again[0] != errors[:3]
    assert again[1] == errors[:3]


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e18])
def test_squares_may_be_out_of_range(scale):
    matrix = (np.outer([1, 2, 3, 4], [1, 0, 2]) * scale).astype(np.float32)
    world = World(chain(via=power_sgd(1)), 1)
    for _ in range(2):
        mean = world.exchange([matrix])[0].mean
    np.testing.assert_allclose(mean / scale, matrix / scale, rtol=1e-4)


def test_the_error_is_orthogonal_to_what_was_sent():
    random = np.random.default_rng(0)
    matrix = random.normal(size=(30, 20))
    world = World(chain(via=power_sgd(3)), 1)
    mean = world.exchange([matrix])[0].mean
    assert np.linalg.matrix_rank(mean) == 3
    np.testing.assert_allclose(mean.T @ (matrix - mean), 0, atol=1e-12)


def test_a_matrix_of_that_rank_is_recovered_at_once():
    random = np.random.default_rng(1)
    matrix = random.normal(size=(40, 3)) @ random.normal(size=(3, 30))
    mean = World(chain(via=power_sgd(3)), 1).exchange([matrix])[0].mean
    np.testing.assert_allclose(mean, matrix, atol=1e-12)


def test_several_ranks_are_one_rank_on_the_mean():
    random = np.random.default_rng(2)
    matrices = random.normal(size=(5, 12, 9))
    several = World(chain(via=power_sgd(2)), 5)
    one = World(chain(via=power_sgd(2)), 1)
    for _ in range(3):
        mean = several.exchange(list(matrices))[0].mean
        np.testing.assert_allclose(mean, one.exchange([matrices.mean(0)])[0].mean, atol=1e-13)


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e15])
def test_rows_that_are_nearly_alike_become_orthonormal(scale):
    rows = np.ones((4, 50)) + 1e-9 * np.random.default_rng(3).normal(size=(4, 50))
    found = orthonormal_rows(backend_of(rows), scale * rows)
    np.testing.assert_allclose(found @ found.T, np.eye(4), atol=1e-12)


def test_a_step_of_zeros_ends_nothing():
    """The factor would be zero for ever after."""
    world = World(PowerSGD(rank=2), 2)
    matrices = list(np.random.default_rng(4).normal(size=(2, 30, 20)).astype(np.float32))
    world.exchange([np.zeros_like(m) for m in matrices])
    assert np.abs(world.exchange(matrices)[0].mean).max() > 0.01


def test_everything_is_sent_before_the_start():
    world = World(PowerSGD(start=2), 2)
    matrices = np.random.default_rng(5).normal(size=(2, 30, 20))
    for step in range(3):
        mean = world.exchange(list(matrices))[0].mean
        assert np.allclose(mean, matrices.mean(0)) == (step < 2)


def floats(shapes, method: PowerSGD) -> int:
    """The bytes of one step, counted from the requests."""
    sizes: list[int] = []

    def note(request: Sum, reply: np.ndarray) -> None:
        assert isinstance(request, Sum)
        sizes.append(request.array.size)

    for shape in shapes.values():
        gradient = np.zeros(shape, np.float32)
        run([alone(method.exchange(gradient, method.init(gradient), Context()), note)])
    return sum(sizes)


def resnet18_cifar(classes: int = 10) -> Shapes:
    """ResNet-18 for images of 32 x 32 pixels, as in experiments on CIFAR-10: a first convolution of
    3 x 3, and no pooling behind it."""
    shapes: Shapes = {"conv1.weight": (64, 3, 3, 3), **norm("bn1", 64)}
    inputs = 64
    for stage, width in enumerate((64, 128, 256, 512), start=1):
        for block in range(2):
            at = f"layer{stage}.{block}"
            for i, channels in enumerate((inputs, width), start=1):
                shapes[f"{at}.conv{i}.weight"] = (width, channels, 3, 3)
                shapes |= norm(f"{at}.bn{i}", width)
            if inputs != width:
                shapes[f"{at}.shortcut.0.weight"] = (width, inputs, 1, 1)
                shapes |= norm(f"{at}.shortcut.1", width)
            inputs = width
    return shapes | linear("linear", classes, inputs)


@pytest.mark.parametrize(
    ("shapes", "dense", "by_rank"),
    [
        (resnet18_cifar(), 11_173_962, {1: 243.26, 2: 135.84, 4: 72.13, 7: 42.34}),
        (ptb_lstm(28_869, 650, 3), 28_949_319, {1: 309.66, 2: 203.14, 4: 120.35}),
    ],
)
def test_ratios_are_those_of_the_paper(shapes, dense, by_rank):
    assert sum(map(math.prod, shapes.values())) == dense
    for rank, ratio in by_rank.items():
        sent = floats(shapes, PowerSGD(rank, min_compression_rate=1))
        assert dense / sent == pytest.approx(ratio, abs=0.005)


def test_matrices_that_would_hardly_shrink_are_sent_whole():
    assert PowerSGD(rank=1).compresses((100, 100))
    assert not PowerSGD(rank=30).compresses((100, 100))
    assert not PowerSGD(rank=1).compresses((4, 4))  # 8 floats of 16 are not less than half
    assert not PowerSGD(rank=1).compresses((1000,))
    assert PowerSGD(rank=2).compresses((64, 3, 7, 7))


def test_it_follows_the_hook_of_pytorch():
    """In a world of one, from the same factor, matrix by matrix."""
    hook = pytest.importorskip("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(30, 20, generator=generator) for _ in range(4)]
    world = World(chain(error_feedback(), via=power_sgd(2)), 1)
    world.states["tensor"] = [PowerSGD(rank=2).init(gradients[0])]
    q = world.states["tensor"][0]["factor"].reshape(2, 20).T.clone()
    error = torch.zeros(30, 20)
    for gradient in gradients:
        # What the hook does between its collectives, with its own functions.
        x = gradient + error
        hook._orthogonalize(q[None])
        p = x @ q
        hook._orthogonalize(p[None])
        q = x.T @ p
        theirs = p @ q.T
        error = x - theirs
        torch.testing.assert_close(world.exchange([gradient])[0].mean, theirs, rtol=1e-3, atol=1e-4)


def test_one_side_a_step_by_hand():
    """P = (1, 1) / sqrt 2: Q = M^T P = (3, 1) / sqrt 2, and P Q^T = [[3, 1], [3, 1]] / 2.  Then
    Q = (3, 1) / sqrt 10: P = M Q = (9, 1) / sqrt 10, and P Q^T = [[27, 9], [3, 1]] / 10."""
    world = World(chain(via=power_sgd(alternate=True)), 1)
    start = {"factor": np.array([5.0, 5.0]), "other_factor": np.array([2.0, 2.0])}
    world.states["tensor"] = [start]
    means = [world.exchange([M])[0].mean for _ in range(8)]
    np.testing.assert_allclose(means[0], [[1.5, 0.5], [1.5, 0.5]], rtol=1e-12)
    np.testing.assert_allclose(means[1], [[2.7, 0.9], [0.3, 0.1]], rtol=1e-12)
    errors = [np.square(M - mean).sum() for mean in means]
    excess = np.array(errors) - 1  # a step is half of one of the power iteration
    np.testing.assert_allclose(excess[3:] / excess[2:-1], 1 / 9, rtol=0.1)


def test_one_side_a_step_sends_half():
    gradient = np.ones((40, 30), np.float32)
    sizes = []
    method = PowerSGD(rank=2, alternate=True)
    state = method.init(gradient)
    for step in range(4):
        exchange = method.exchange(gradient, state, Context(step=step))
        request = next(exchange)
        sizes.append(request.array.size)
        with pytest.raises(StopIteration) as stop:
            exchange.send(request.array)
        state = stop.value.value.state
    assert sizes == [60, 80, 60, 80]
    assert PowerSGD(rank=2, alternate=True).compresses((8, 8))
    assert not PowerSGD(rank=2).compresses((8, 8))


def test_one_side_a_step_needs_the_step_before():
    with pytest.raises(ConfigError, match="warm_start=True"):
        PowerSGD(alternate=True, warm_start=False)


@pytest.mark.parametrize("alternate", [False, True])
def test_both_ways_to_orthogonalise_agree(alternate):
    random = np.random.default_rng(3)
    ways = [
        World(chain(error_feedback(), via=power_sgd(3, True, alternate, way)), 2)
        for way in ("gram_schmidt", "qr")
    ]
    for _ in range(6):
        gradients = [random.standard_normal((12, 9)) for _ in range(2)]
        ours, theirs = (world.exchange(gradients)[0].mean for world in ways)
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)
