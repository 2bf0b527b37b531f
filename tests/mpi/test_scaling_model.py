"""The model of a whole step in benchmarks/, by numbers computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.scaling_model import METHODS, StepModel, entry_bytes
from hvd_compress import mpi
from hvd_compress.wire import encode_sparse

COST = mpi.CostModel(4, alpha=1e-4, beta=1e-8, gamma=1e-9, overhead=1e-5, merge=1e-7)
PYTHON = {"float32": 1e-3, "fp16": 2e-3, "DGC": 3e-3}
MODEL = StepModel(
    COST, stream=1e-10, cast=1e-9, frame=1e-5, entry=2e-8, python=PYTHON, density=2**-10
)
N = 2**20  # of which DGC sends 1024; an index has 10 + 1.5 bits


def test_bytes_of_an_entry():
    assert entry_bytes(N, 1024) == 4 + 11.5 / 8 + 16 / 1024
    assert entry_bytes(N, 1024, value=2) == 2 + 11.5 / 8 + 16 / 1024


def test_bytes_of_an_entry_are_those_of_messages():
    rng = np.random.default_rng(0)
    n, k = 10**6, 1000
    indices = rng.choice(n, k, replace=False)
    indices.sort()
    frame = encode_sparse(indices, rng.standard_normal(k).astype("float32"), n, "packed")
    assert k * entry_bytes(n, k) == pytest.approx(frame.nbytes, rel=0.01)


def test_local_work():
    assert MODEL.local_seconds("float32", N) == pytest.approx(20e-10 * N + 1e-3)
    assert MODEL.local_seconds("fp16", N) == pytest.approx((20e-10 + 3e-9) * N + 2e-3)
    assert MODEL.local_seconds("fp16 at best", N) == pytest.approx(20e-10 * N + 2e-3)
    for name in ("DGC", "split_allgather", "Ok-Topk"):
        assert MODEL.local_seconds(name, N) == pytest.approx(24e-10 * N + 3e-3)


def test_dense_messages_are_those_of_the_fastest_algorithm():
    # Bytes cost all alike here, and rounds decide: 2 (1e-4 + 2e-5) for direct, 4e-4 for halving.
    bytes_of_four = 1.5 * 4 * N * 1e-8 + 0.75 * 4 * N * 1e-9
    assert MODEL.message_seconds("float32", N, 4) == pytest.approx(2.4e-4 + bytes_of_four)
    # On 64 ranks 2 (1e-4 + 62e-5) = 1.44e-3 and 12e-4.
    bytes_of_many = (2 * 1e-8 + 1e-9) * 4 * N * 63 / 64
    assert MODEL.message_seconds("float32", N, 64) == pytest.approx(1.2e-3 + bytes_of_many)
    # Only direct sends all of half precision in 2 bytes, which counts more than its rounds do.
    bytes_of_half = (2 * 1e-8 + 1e-9) * 2 * N * 63 / 64
    for name in ("fp16", "fp16 at best"):
        assert MODEL.message_seconds(name, N, 64) == pytest.approx(1.44e-3 + bytes_of_half)


def test_an_allgather_grows_with_the_ranks():
    sent = 1024 * entry_bytes(N, 1024)
    for p, fan in ((2, 1e-4), (4, 1.2e-4), (64, 7.2e-4)):
        expected = 2 * fan + (p - 1) * sent * 1e-8 + p * (1e-5 + 1024 * 2e-8)
        assert MODEL.message_seconds("DGC", N, p) == pytest.approx(expected)


def test_dgc_sends_everything_where_entries_of_all_ranks_are_more():
    # 1024 entries of 8 bytes, less one that does not decide, are more than 8 N bytes in all from
    # 1026 ranks on: 1023 * 1026 = 1049598, and N = 1048576.
    dense = [MODEL.message_seconds("float32", N, p) for p in (1025, 1026)]
    own = [MODEL.message_seconds("DGC", N, p) for p in (1025, 1026)]
    assert own[0] != dense[0]
    assert own[1] == dense[1]


def test_a_sum_in_four_rounds_merges_sparse_vectors():
    # A region's vectors are merged into the sum of those before: 1 + 1, 2 + 1 and 3 + 1 quarters.
    sums = [N * (1 - (1 - 1024 / N) ** ranks) for ranks in (1, 2, 3, 4)]
    moved = 0.75 * (1024 + sums[3]) * entry_bytes(N, 1024)
    merged = sum(sums[:3]) / 4 + 3 * 1024 / 4
    expected = 4 * 1.2e-4 + moved * 1e-8 + (merged + sums[3]) * 1e-7
    assert MODEL.message_seconds("split_allgather", N, 4) == pytest.approx(expected)


def test_one_rank_sends_nothing():
    for name in METHODS:
        assert MODEL.seconds(name, N, 1) == MODEL.local_seconds(name, N)


def test_the_number_of_ranks_is_the_measured_one_unless_given():
    assert MODEL.seconds("DGC", N) == MODEL.seconds("DGC", N, 4) < MODEL.seconds("DGC", N, 5)


def test_where_two_methods_cross():
    # Without latency, local work and adding up, DGC has (p - 1) k e bytes on the line where fp16
    # has 4 n (p - 1) / p: they cross at p = 4 n / (k e) = 4096 / e, which is 751.5.
    free = mpi.CostModel(2, alpha=0.0, beta=1e-8, gamma=0.0, overhead=0.0)
    model = StepModel(free, *4 * [0.0], dict.fromkeys(PYTHON, 0.0), 2**-10)
    assert 751 < 4096 / entry_bytes(N, 1024) < 752
    assert model.crossing("DGC", "fp16", N) == 752
    assert model.crossing("DGC", "fp16", N, most=751) is None
    assert model.crossing("float32", "DGC", N) == 2


def test_another_network():
    points = dict.fromkeys(("direct", "ring", "halving_doubling"), ((8, 1.0), (16, 1.0)))
    measured = mpi.CostModel(4, 1e-4, 1e-8, 1e-9, 1e-5, points, beta_pair=2e-8, beta_fan=3e-8)
    model = StepModel(measured, *4 * [0.0], PYTHON)
    faster = model.on(8.0, 5e-6).cost
    assert (faster.alpha, faster.beta, faster.overhead) == (5e-6, 1e-9, 5e-6)
    # halving_doubling's 4 rounds are less than 2 (alpha + 2 overhead); no measured point counts
    expected = 4 * 5e-6 + 1.5 * 4000 * 1e-9 + 0.75 * 4000 * 1e-9
    assert model.on(8.0, 5e-6).message_seconds("float32", 1000, 4) == pytest.approx(expected)
    same = model.on(None, 2e-4).cost
    assert (same.alpha, same.overhead) == (2e-4, 1e-5)
    assert (same.beta, same.beta_pair, same.beta_fan) == (1e-8, 2e-8, 3e-8)
