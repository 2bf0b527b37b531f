"""Deep Gradient Compression against numbers by hand, other optimizers and the paper's formulas."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_compress import DGC, ConfigError, Context, Sparse, StagedWarmup, TopK
from hvd_compress.blocks import (
    allgather,
    allreduce,
    chain,
    error_feedback,
    momentum_correction,
    top_k,
)
from hvd_compress.engines.lockstep import World, run
from hvd_compress.wire import decode_sparse

# By hand: momentum 0.9, one of three elements a step, one rank.
GRADIENTS = [(1, 0.5, -0.25), (0.2, 0.4, -0.5), (-0.1, 0.3, 0.6)]
#              sent, velocity, residual
PLAIN = [
    ((1, 0, 0), (0, 0.5, -0.25), (0, 0.5, -0.25)),
    ((0, 1.35, 0), (0.2, 0, -0.725), (0.2, 0, -0.975)),
    ((0, 0, -1.0275), (0.08, 0.3, 0), (0.28, 0.3, 0)),
]
NESTEROV = [
    ((1.9, 0, 0), (0, 0.45, -0.225), (0, 0.95, -0.475)),
    ((0, 2.115, 0), (0.18, 0, -0.6525), (0.38, 0, -1.6275)),
    ((0, 0, -1.07475), (0.072, 0.27, 0), (0.352, 0.57, 0)),
]


def dense(sent, n):
    if not isinstance(sent, Sparse):
        return np.asarray(sent, float)
    result = np.zeros(n)
    result[sent.indices] = sent.values
    return result


def draw(steps, ranks, shape, seed=0, dtype=np.float64):
    return np.random.default_rng(seed).normal(size=(steps, ranks, *shape)).astype(dtype)


@pytest.mark.parametrize("nesterov", [False, True], ids=["plain", "nesterov"])
def test_table_by_hand(nesterov):
    world = World(DGC(density=1 / 3, momentum=0.9, nesterov=nesterov, min_size=0), size=1)
    for gradient, (sent, velocity, residual) in zip(
        GRADIENTS, NESTEROV if nesterov else PLAIN, strict=True
    ):
        outcome = world.exchange([np.array([gradient], float)])[0]
        near = {"rtol": 0, "atol": 1e-7}  # float32 on the wire
        np.testing.assert_allclose(outcome.mean, [sent], **near)
        np.testing.assert_allclose(dense(outcome.sent, 3), sent, **near)
        np.testing.assert_allclose(outcome.state["velocity"], velocity, **near)
        np.testing.assert_allclose(outcome.state["residual"], residual, **near)
        assert outcome.update is None


def torch_sgd(weights, gradients, lr, m, nesterov):
    w = torch.nn.Parameter(torch.from_numpy(weights.copy()))
    optimizer = torch.optim.SGD([w], lr=lr, momentum=m, nesterov=nesterov)
    for g in gradients:
        w.grad = torch.from_numpy(g)
        optimizer.step()
    return w.detach().numpy()


def stepped(world, weights, gradients, lr):
    w = weights.copy()
    for g in gradients:
        w = w - lr * world.exchange(list(g))[0].direction
    return w


DENSE = {
    # the method's own dense stage, the same through a chain, and tensors that are too small
    "density-1": lambda m, n: DGC(density=1.0, momentum=m, nesterov=n, min_size=0),
    "chain": lambda m, n: chain(
        momentum_correction(m, n, masking=False), error_feedback(), via=allgather(top_k(1.0))
    ),
    "tiny": lambda m, n: DGC(density=0.01, momentum=m, nesterov=n, min_size=13),
}


@pytest.mark.parametrize("nesterov", [False, True], ids=["plain", "nesterov"])
@pytest.mark.parametrize("make", DENSE.values(), ids=DENSE)
def test_density_1_without_masking_is_momentum_sgd(make, nesterov):
    weights, gradients = draw(1, 1, (3, 4), seed=1)[0, 0], draw(20, 3, (3, 4))
    ours = stepped(World(make(0.9, nesterov), 3), weights, gradients, lr=0.1)
    theirs = torch_sgd(weights, gradients.mean(axis=1), 0.1, 0.9, nesterov)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "via", [allgather(top_k(1.0)), allreduce()], ids=["allgather", "allreduce"]
)
def test_density_1_with_masking_is_plain_sgd(via):
    """Whatever is sent is masked, so no velocity survives a step."""
    method = chain(momentum_correction(0.9), error_feedback(), via=via)
    weights, gradients = draw(1, 1, (3, 4), seed=1)[0, 0], draw(20, 3, (3, 4))
    ours = stepped(World(method, 3), weights, gradients, lr=0.1)
    np.testing.assert_allclose(ours, weights - 0.1 * gradients.mean(axis=1).sum(axis=0), atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("values", ["float32", "float16"])
@pytest.mark.parametrize("masking", [True, False])
def test_momentum_0_is_top_k_with_error_feedback_to_the_bit(masking, values, dtype):
    dgc = World(DGC(density=0.05, momentum=0.0, masking=masking, values=values, min_size=0), 3)
    topk = World(TopK(density=0.05, values=values), 3)
    for gradients in draw(20, 3, (9, 11), dtype=dtype):
        ours, theirs = dgc.exchange(list(gradients)), topk.exchange(list(gradients))
        for a, b in zip(ours, theirs, strict=True):
            assert a.mean.tobytes() == b.mean.tobytes()
            assert a.state["residual"].tobytes() == b.state["residual"].tobytes()


def by_the_paper(gradients, density, m, nesterov, masking):
    """Multi-rank DGC on dense arrays, from the paper's algorithm: yields G, u and v a step."""
    steps, ranks, n = gradients.shape
    u, v = np.zeros((ranks, n)), np.zeros((ranks, n))
    k = math.ceil(density * n)
    for t in range(steps):
        total = np.zeros(n)
        for i in range(ranks):
            g = gradients[t, i]
            if nesterov:
                u[i] = m * (u[i] + g)
                v[i] = v[i] + u[i] + g
            else:
                u[i] = m * u[i] + g
                v[i] = v[i] + u[i]
            mask = np.zeros(n, bool)
            mask[np.argsort(-np.abs(v[i]), kind="stable")[:k]] = True
            total += v[i] * mask
            v[i] *= ~mask
            if masking:
                u[i] *= ~mask
        yield total / ranks, u.copy(), v.copy()


@pytest.mark.parametrize("masking", [True, False], ids=["masking", "no-masking"])
@pytest.mark.parametrize("nesterov", [False, True], ids=["plain", "nesterov"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("density", [0.01, 0.3], ids=["gathered", "summed"])
def test_agrees_with_the_formulas_over_50_steps(density, ranks, nesterov, masking):
    gradients = draw(50, ranks, (10, 20)).reshape(50, ranks, 200)
    dgc = DGC(density, momentum=0.9, nesterov=nesterov, masking=masking, min_size=0)
    world = World(dgc, ranks)
    reference = by_the_paper(gradients, density, 0.9, nesterov, masking)
    for step, (mean, u, v) in enumerate(reference):
        outcomes = world.exchange([g.reshape(10, 20) for g in gradients[step]])
        near = {"rtol": 0, "atol": 2**-24 * np.abs(v + mean).max() * 8}  # float32 on the wire
        np.testing.assert_allclose(outcomes[0].mean.reshape(-1), mean, **near)
        for rank, outcome in enumerate(outcomes):
            np.testing.assert_allclose(outcome.state["velocity"], u[rank], rtol=0, atol=1e-12)
            np.testing.assert_allclose(outcome.state["residual"], v[rank], **near)


@pytest.mark.parametrize("sums", [True, False], ids=["summed", "averaged"])
@pytest.mark.parametrize("size", [1, 4, 9])
def test_each_rank_clips_to_threshold_over_sqrt_n_before_accumulating(size, sums):
    """The part that a rank adds to the common gradient: g if gradients are summed, else g / N."""
    dgc = DGC(density=0.5, momentum=0.9, clip_norm=3.0, min_size=0)
    state = dgc.init(np.zeros((1, 2)))
    gradients = [np.array([[3.0, 4.0]])] + [np.array([[0.03, 0.04]])] * (size - 1)
    outcomes = run(
        [
            dgc.exchange(
                g,
                {k: v.copy() for k, v in state.items()},
                Context(rank=r, size=size, sums=sums),
            )
            for r, g in enumerate(gradients)
        ]
    )
    limit = 3.0 / math.sqrt(size)  # rank 0 has norm 5 and is clipped, the others are below
    if not sums:
        limit *= size
    clipped = np.array([0.6, 0.8]) * min(limit, 5.0)
    first = outcomes[0]
    entered = dense(first.sent, 2) + first.state["residual"]
    np.testing.assert_allclose(entered, clipped, rtol=1e-15)
    np.testing.assert_allclose(first.state["velocity"], [clipped[0], 0], rtol=1e-15)
    for outcome in outcomes[1:]:
        entered = dense(outcome.sent, 2) + outcome.state["residual"]
        np.testing.assert_allclose(entered, [0.03, 0.04], rtol=1e-15)


def test_clipping_goes_by_the_norm_over_all_tensors_where_it_is_known():
    dgc = DGC(density=0.5, momentum=0.0, clip_norm=2.0, min_size=0)
    assert dgc.needs_gradient_norm
    assert not DGC().needs_gradient_norm
    with pytest.raises(ConfigError, match="clip_norm"):
        DGC(clip_norm=1.0, weight_decay="gradient")
    # 2 / sqrt(4) / 10 = 1/10, whatever the tensor
    context = Context(size=4, gradient_norm=10.0, sums=True)
    gradient = np.array([[0.5, 0.25]])
    exchange = dgc.exchange(gradient, dgc.init(gradient), context)
    request = next(exchange)
    indices, values = decode_sparse(request.payload, 2, "float32", 1)
    assert indices == [0]
    np.testing.assert_allclose(values, [0.05])


@pytest.mark.parametrize("shape", [(8,), (2, 4)], ids=["vector", "matrix"])
def test_tensors_sent_whole_are_clipped_too(shape):
    world = World(DGC(density=0.1, momentum=0.9, clip_norm=1.0), 1)
    for step in range(3):
        update = world.exchange([np.full(shape, 10.0)])[0].direction
        assert np.linalg.norm(update) == pytest.approx(sum(0.9**t for t in range(step + 1)))


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_spoilt_norm_spoils_every_tensor_of_the_step(norm):
    """The NaN is in another tensor; this one must not accumulate half a step."""
    dgc = DGC(density=0.5, momentum=0.9, clip_norm=1.0, min_size=0)
    gradient = np.ones((2, 2))
    state = dgc.init(gradient)
    contexts = [Context(rank=0, size=2), Context(rank=1, size=2, gradient_norm=norm)]
    for outcome in run([dgc.exchange(gradient, dict(state), c) for c in contexts]):
        assert not np.isfinite(outcome.mean).all()
        assert not any(array.any() for array in outcome.state.values())


@pytest.mark.parametrize(
    ("shape", "min_size"),
    [((5000,), 0), ((), 0), ((0, 4), 0), ((30, 30), 1024)],
    ids=["vector", "scalar", "empty", "tiny"],
)
@pytest.mark.parametrize("nesterov", [False, True], ids=["plain", "nesterov"])
def test_vectors_and_tiny_tensors_go_whole_with_momentum_afterwards(shape, min_size, nesterov):
    dgc = DGC(density=0.001, momentum=0.9, nesterov=nesterov, min_size=min_size)
    world = World(dgc, 2)
    assert not dgc.compresses(shape)
    assert dgc.per_rank(np.zeros(shape)) == set()
    v = np.zeros(shape)
    for gradients in draw(5, 2, shape):
        mean = gradients.mean(axis=0)
        v = 0.9 * v + mean
        outcome = world.exchange([np.asarray(g) for g in gradients])[0]
        assert outcome.state.keys() == {"velocity"}
        np.testing.assert_allclose(outcome.mean, mean, atol=1e-14)
        np.testing.assert_allclose(outcome.update, mean + 0.9 * v if nesterov else v, atol=1e-14)


def test_which_tensors_are_compressed():
    assert DGC().compresses((32, 32))
    assert not DGC().compresses((31, 33))
    assert DGC(min_size=0).compresses((1, 1))
    assert not DGC(min_size=0).compresses((1 << 20,))


def test_a_dense_stage_flushes_the_residual_and_keeps_the_velocity():
    dgc = DGC(StagedWarmup(densities=(0.25, 1.0, 0.25)), momentum=0.9, min_size=0)
    world = World(dgc, 2)
    gradients = draw(3, 2, (2, 4), dtype=np.float32)
    sparse = world.exchange(list(gradients[0]))
    u, v = (np.array([o.state[key] for o in sparse]) for key in ("velocity", "residual"))
    assert np.count_nonzero(v) == 12  # 2 of 8 elements went
    flushed = world.exchange(list(gradients[1]))
    u = 0.9 * u + gradients[1].reshape(2, 8)
    v = v + u
    np.testing.assert_allclose(flushed[0].mean.reshape(-1), v.mean(axis=0), atol=1e-6)
    for rank in range(2):
        np.testing.assert_allclose(flushed[rank].state["velocity"], u[rank], atol=1e-6)
        assert not flushed[rank].state["residual"].any()
    last = world.exchange(list(gradients[2]))  # sparse again, masked again
    for outcome in last:
        assert isinstance(outcome.sent, Sparse)
        assert np.count_nonzero(outcome.state["velocity"]) == 6


def test_momentum_comes_from_the_optimizer_unless_given():
    def second_step(dgc, **context):
        world = World(dgc, 1)
        gradient = np.array([[2.0, 0.5]])
        world.exchange([gradient], **context)
        return world.exchange([gradient], **context)[0].state["velocity"].tolist()

    sent = {"density": 0.5, "min_size": 0}
    # The first element is sent and masked in both steps, the second waits: u = m / 2 + 1 / 2.
    assert second_step(DGC(**sent), momentum=0.5) == [0.0, 0.75]
    assert second_step(DGC(momentum=0.25, **sent), momentum=0.5) == [0.0, 0.625]
    assert second_step(DGC(momentum=0.0, **sent), momentum=0.5) == [0.0, 0.5]


@settings(max_examples=50)
@given(
    density=st.floats(0.001, 1.0),
    shape=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    size=st.integers(1, 4),
)
def test_exactly_k_elements_are_sent_and_exactly_those_are_masked(density, shape, size):
    world = World(DGC(density, momentum=0.9, min_size=0), size)
    n = math.prod(shape)
    k = min(n, math.ceil(density * n - 1e-9))
    for gradients in draw(2, size, shape):
        for outcome in world.exchange(list(gradients)):
            if k == n:  # a whole tensor: nothing waits
                assert not outcome.state["residual"].any()
                continue
            assert outcome.sent.indices.size == k
            assert not outcome.state["velocity"][outcome.sent.indices].any()
            assert np.count_nonzero(outcome.state["velocity"]) == n - k
