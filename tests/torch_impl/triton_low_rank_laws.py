"""Low rank in Triton against the loops for host memory, bit for bit; see triton_laws.py."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_compress import PowerSGD
from hvd_compress.chain import Chain, in_range
from hvd_compress.engines.local import LocalEngine
from hvd_compress.engines.lockstep import replies_to
from hvd_compress.kernels import Column, low_rank
from hvd_compress.meetings import power_sgd
from hvd_compress.reduce import Reducer
from hvd_compress.transforms import error_feedback
from tests.kernels.buckets import Ranks, assert_all_equal, gradients_of, one_by_one
from tests.torch_impl.triton_laws import (
    DEVICE,
    FEW,
    INTERPRETED,
    assert_same,
    moved_to_host,
    waits_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


@pytest.fixture(scope="module")
def own():
    from hvd_compress.torch.triton import low_rank

    return low_rank


@pytest.fixture
def no_loads_ahead(monkeypatch):
    """The interpreter takes as long for those beyond the end; bits do not depend on them."""
    from hvd_compress.torch.triton import low_rank_kernels

    if INTERPRETED:
        monkeypatch.setattr(low_rank_kernels, "_AHEAD", type(low_rank_kernels.ROWS)(1))


def again(x):
    return x.clone() if isinstance(x, torch.Tensor) else x.copy()


def step_of(power_step, device, shapes, rank, seed, *, bad=None, keeps=True):
    """All that two ranks compute in a step, of numbers of which one of the second rank's is
    ``bad``."""
    random, to = np.random.default_rng(seed), functools.partial(torch.tensor, device=device)
    ranks = [min(*shape, rank) for shape in shapes]
    normal = lambda n: random.standard_normal(n).astype(np.float32)  # noqa: E731
    factors, found = [normal(m * k) for (_, m), k in zip(shapes, ranks, strict=True)], []
    factors[-1][:] = 0  # which stays the same
    arrays = [[[normal(n * m) for n, m in shapes] for _ in range(1 + keeps)] for _ in "ab"]
    if bad is not None:
        arrays[1][0][0].flat[[0, -1]] = bad
    columns, steps = [], []
    for x, *residuals in arrays:
        x, *others = ([to(a) for a in part] for part in (x, factors, *residuals))
        columns.append([Column(x), Column(x), *map(Column, others)])
        steps.append(power_step(shapes, ranks, 2, x[0]))
    pairs = list(zip(steps, columns, strict=True))
    found.append([step.left(own) for step, own in pairs])
    total = found[-1][0] + found[-1][1]
    found.append([step.right(own, again(total)) for step, own in pairs])
    total = found[-1][0] + found[-1][1]
    for step, own in pairs:
        finite = step.settle(own, again(total))
        for column in own[2:]:
            for i in [] if finite is None else np.flatnonzero(~finite):  # a GPU has done so
                column.arrays[i] = in_range({"x": column.arrays[i]})["x"]
        found += [column.arrays for column in own]
    return [x for part in found for x in part]


def assert_steps(own, shapes, rank, seed=0, **options):
    found = step_of(own.PowerStepOnGPU, DEVICE, shapes, rank, seed, **options)
    expected = step_of(low_rank.PowerStepOnHost, "cpu", shapes, rank, seed, **options)
    for x, y in zip(found, expected, strict=True):
        assert_same(x, y.numpy() if isinstance(y, torch.Tensor) else y)


@pytest.mark.parametrize(
    ("shapes", "rank", "options"),
    [
        ([(5, 7), (1, 1)], 2, {}),
        ([(260, 17)], 1, {}),
        ([(2, 4100)], 1, {"keeps": False}),
        ([(4, 20), (9, 33), (2, 3)], 3, {"bad": np.nan}),
        ([(6, 5), (3, 8)], 4, {"bad": np.inf}),
        ([(6, 35), (3, 8)], 1, {"bad": 3e38, "keeps": False}),
        ([(9, 17), (8, 8)], 8, {}),
        ([(16, 18)], 16, {}),
    ],
    ids=str,
)
def test_steps_are_those_of_the_host(own, no_loads_ahead, shapes, rank, options):
    """Also of matrices of which one is not finite, or products overflow."""
    assert_steps(own, shapes, rank, **options)


def test_steps_have_several_loads_under_way(own):
    assert_steps(own, [(5, 130)], 2)


@pytest.mark.skipif(INTERPRETED, reason="takes long in the interpreter")
@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(
            st.sampled_from([1, 2, 63, 255, 256, 259, 2100, 4099, 9000]),
            st.sampled_from([1, 3, 15, 17, 147, 1000, 4096, 4500, 33_000]),
        ).filter(lambda shape: shape[0] * shape[1] < 10**7),
        min_size=1,
        max_size=4,
    ),
    rank=st.integers(1, 16),
    bad=st.sampled_from([None, None, np.nan, np.inf, 3e38]),
    keeps=st.booleans(),
    seed=st.integers(0, 100),
)
def test_drawn_steps_are_those_of_the_host(own, shapes, rank, bad, keeps, seed):
    assert_steps(own, shapes, rank, seed, bad=bad, keeps=keeps)


METHODS = [
    Chain((error_feedback(),), via=power_sgd(rank=2)),
    Chain((), via=power_sgd(rank=1)),
    PowerSGD(rank=3, min_compression_rate=1),
]
SHAPES = {"a": (6, 5, 2), "b": (3, 9), "c": (4, 4)}


def beside_each_other(requests):
    """Replies to ranks of which some speak NumPy, as engines of PyTorch give them."""
    on_host = [
        each.carrying(
            [np.asarray(x.cpu() if isinstance(x, torch.Tensor) else x) for x in each.arrays]
        )
        for each in requests
    ]
    found = []
    for each, reply in zip(requests, replies_to(on_host), strict=True):
        (x,) = each.arrays
        is_tensor = isinstance(x, torch.Tensor)
        found.append(torch.tensor(reply, device=x.device) if is_tensor else reply.copy())
    return found


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("method", METHODS[: 1 if INTERPRETED and FEW else None], ids=repr)
def test_buckets_are_what_their_tensors_are(own, no_loads_ahead, by_triton, method, mixed):
    """The whole exchange, against the blocks of the chain in NumPy, over steps with a NaN on one
    rank; also if the other rank has no device."""
    ranks, expected = Ranks(method, SHAPES, 2, in_place=not mixed), one_by_one(method, 2)
    random = np.random.default_rng(3)
    for step in range(3):
        gradients = gradients_of(random, SHAPES, 2)
        if step == 1:
            gradients[1]["b"][2, 3] = np.nan
        places = [torch.device("cpu") if mixed else DEVICE, DEVICE]
        ours = [
            {n: torch.tensor(x, device=place) for n, x in g.items()}
            for g, place in zip(gradients, places, strict=True)
        ]
        if mixed:
            by_triton.clear()
            by_triton.update(x.data_ptr() for x in ours[0].values())
        found = ranks.exchange(ours, beside_each_other if mixed else replies_to)
        assert_all_equal(moved_to_host(found), expected(gradients))
        for rank, mine in enumerate(found):
            for name, outcome in mine.items():
                shared = outcome.mean.data_ptr() == ours[rank][name].data_ptr()
                assert shared is not mixed


def test_ranks_that_are_too_large_are_exchanged_by_blocks(own, by_triton):
    x = torch.zeros(40, 40, device=DEVICE)
    for rank, taken in ((16, True), (17, False)):
        assert power_sgd(rank=rank).fused((), None).takes(x) is taken


def test_a_bucket_is_eight_launches_and_no_wait(own, no_loads_ahead, by_triton, monkeypatch):
    """Whatever the number of matrices, in a step like the one before."""
    from triton.runtime import jit

    from hvd_compress.torch.triton import tasks

    launched, uploads, launch = [], [], jit.KernelInterface.__getitem__

    def counting(kernel, grid):
        launched.append(kernel.fn)
        return launch(kernel, grid)

    for count in (2, 5) if INTERPRETED and FEW else (4, 12):
        reducer, random = (
            Reducer(METHODS[0], LocalEngine(), in_place=True),
            np.random.default_rng(0),
        )
        # Their memory stays where it is.
        gradients = {f"{i}": torch.zeros(4, 6, device=DEVICE) for i in range(count)}
        with monkeypatch.context() as patch:
            for number in range(3):
                for x in gradients.values():
                    x.copy_(torch.tensor(random.standard_normal((4, 6)).astype(np.float32)))
                if number == 2:
                    patch.setattr(jit.KernelInterface, "__getitem__", counting)
                    patch.setattr(tasks, "from_numpy", uploads.append)
                waits = waits_of(functools.partial(reducer.reduce, gradients))
        assert len(set(launched)) == len(launched) == 8
        assert waits == 0
        assert not uploads
        launched.clear()
