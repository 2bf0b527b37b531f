"""Rows of sparse gradients: what is sent, what waits, in NumPy, PyTorch and TensorFlow."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf
import torch

from hvd_compress import (
    BF16,
    DGC,
    FP16,
    ConfigError,
    NoCompression,
    PayloadError,
    PowerSGD,
    TopK,
    as_compressor,
    from_config,
    partition,
    switch,
)
from hvd_compress.backends import backend_of
from hvd_compress.base import Context
from hvd_compress.codecs import linear
from hvd_compress.codecs.frame import decode_coded, encode_sent
from hvd_compress.engines import lockstep
from hvd_compress.engines.joining import alone
from hvd_compress.methods.rows import Rows, as_rows, exchange_rows, keeps_residual, rows_state
from hvd_compress.tensorflow.slots import TensorSlot
from hvd_compress.tensorflow.store import VariableStore
from hvd_compress.torch.state import store as torch_store

FEEDBACK = ("int8", "float8", "top:0.3", "top:0.3:int8", "top:0.3:float16")
ALL = ("whole", "float16", *FEEDBACK)
WORDS, WIDTH = 20, 5


def merged(indices, values):
    own, places = np.unique(indices, return_inverse=True)
    total = np.zeros((own.size, *values.shape[1:]), values.dtype)
    with np.errstate(over="ignore"):
        np.add.at(total, places, values)
    return own, total


class World:
    """Ranks with a residual each, in one of the frameworks; all arrays go in and out as NumPy's,
    which has no bfloat16: as float32."""

    def __init__(self, text, ranks, framework="numpy", words=WORDS, width=WIDTH, dtype="float32"):
        self.text, self.rows = text, as_rows(text)
        self.framework, self.shape = framework, (words, width)
        wide = "float64" if dtype == "float64" else "float32"
        self.residuals = [np.zeros((words, width), wide) for _ in range(ranks)]
        self.dtype, self.bytes, self.sent = dtype, [0] * ranks, [0] * ranks
        self.outcomes = []

    def step(self, gradients):
        """Return the dense mean of all ranks' (indices, values), which may have duplicates."""
        exchanges = []
        for rank, (indices, values) in enumerate(gradients):
            plain = "float32" if self.dtype == "bfloat16" else self.dtype
            indices, values = np.array(indices, np.int64), np.array(values, plain)
            values = values.reshape(indices.size, self.shape[1])
            context = Context("e", rank, len(gradients))

            def count(request, _, rank=rank):
                self.bytes[rank] = int(backend_of(request.payload).size(request.payload))

            exchanges.append(alone(self._exchange(rank, indices, values, context), count))
        self.outcomes = lockstep.run(exchanges)
        means = [np.asarray(self._after(rank, each)) for rank, each in enumerate(self.outcomes)]
        for mean in means:
            np.testing.assert_array_equal(mean, means[0])
        return means[0]

    def _exchange(self, rank, indices, values, context):
        residual = self.residuals[rank].reshape(-1) if self.rows.keeps_residual else None
        if self.framework == "torch":
            places = torch.from_numpy(indices)[None]
            values = torch.from_numpy(values).to(getattr(torch, self.dtype))
            gradient = torch.sparse_coo_tensor(places, values, self.shape, check_invariants=True)
            own = None if residual is None else torch.from_numpy(residual)
            return torch_store.exchange_rows(gradient, context, self.rows, own)
        if self.framework == "tensorflow":
            gradient = tf.IndexedSlices(tf.constant(values), tf.constant(indices), self.shape)
            slot = TensorSlot("e", tf.TensorShape(self.shape), gradient.dtype)
            store = VariableStore(NoCompression(rows=self.text), [slot], 0, False, 0.0, False)
            if residual is not None:
                store.states["0"]["residual"].assign(residual)
            return store.branch(store.method, None).rows("e", gradient, context)
        indices, values = merged(indices, values)
        self.touched = {**getattr(self, "touched", {}), rank: indices}
        waiting = self.residuals[rank][indices] if self.rows.keeps_residual else None
        return exchange_rows(
            self.rows,
            indices,
            values,
            waiting=waiting,
            n=self.shape[0],
            context=context,
            merge=merged,
        )

    def _after(self, rank, outcome):
        self.sent[rank] = int(backend_of(outcome.sent).size(outcome.sent))
        if self.framework == "torch":
            assert outcome.mean.dtype is getattr(torch, self.dtype)
            mean = outcome.mean.to_dense()
            return mean.float() if self.dtype == "bfloat16" else mean
        if self.framework == "tensorflow":
            if outcome.state:
                changed = outcome.state["residual"]
                self.residuals[rank].reshape(-1)[changed.indices.numpy()] = changed.values.numpy()
            return tf.convert_to_tensor(outcome.mean)
        if outcome.left is not None:
            self.residuals[rank][self.touched[rank]] = outcome.left
        mean = np.zeros(self.shape, outcome.values.dtype)
        mean[outcome.indices] = outcome.values
        return mean


def gradients(step, ranks, words=WORDS, width=WIDTH):
    """The rows of every rank, with duplicates; the last has none in every other step."""
    found = []
    for rank in range(ranks):
        random = np.random.default_rng([step, rank])
        m = 0 if rank == ranks - 1 and step % 2 else 9
        found.append((random.integers(0, words, m), random.standard_normal((m, width))))
    return found


def test_top_rows_by_hand():
    """Norms 5, 13 and 10: at a half of three rows, two are sent, and the first of rank 0 waits."""
    world = World("top:0.5", 2, words=6, width=2)
    first = ([1, 3, 4], [[3, 4], [5, -12], [6, 8]]), ([4], [[1, 1]])
    mean = world.step(first)
    assert mean[[1, 3, 4]].tolist() == [[0, 0], [2.5, -6], [3.5, 4.5]]
    assert world.residuals[0][[1, 3, 4]].tolist() == [[3, 4], [0, 0], [0, 0]]
    assert world.sent == [4, 2], "one row at least"
    # Rows that are not touched wait, however large they are.
    mean = world.step((([0, 2], [[1, 0], [0, 1]]), ([], [])))
    assert mean[[0, 2]].tolist() == [[0.5, 0], [0, 0]], "of two that are equal, the first"
    assert world.residuals[0][[1, 2]].tolist() == [[3, 4], [0, 1]]
    mean = world.step((([1, 5], [[0, 1], [5, 0]]), ([], [])))  # 3, 4 + 1: norm 5.8
    assert mean[[1, 5]].tolist() == [[1.5, 2.5], [0, 0]]


def test_rows_of_8_bits_by_hand():
    """The scale of a row is its largest magnitude / 127: 1 here, and 0.5."""
    world = World("int8", 1, words=4, width=2)
    mean = world.step([([2, 0, 2], [[100, -60], [-63.5, 10.2], [27, -3.375]])])
    assert mean[[0, 2]].tolist() == [[-63.5, 10], [127, -63]]
    np.testing.assert_allclose(world.residuals[0][[0, 2]], [[0, 0.2], [0, -0.375]], atol=1e-6)
    assert world.bytes == [16 + 2 * 4 + 2 * (4 + 2) + 4], "header, int32, scales and codes, zeros"
    mean = world.step([([2], [[127, -63.25]])])
    assert mean[2].tolist() == [127, -64], "with what was rounded off before"


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
@pytest.mark.parametrize("text", ALL)
def test_frameworks_send_what_numpy_does(text, framework):
    ours, theirs = World(text, 3), World(text, 3, framework)
    for step in range(4):
        means = [world.step(gradients(step, 3)) for world in (ours, theirs)]
        np.testing.assert_allclose(*means, rtol=1e-6, atol=1e-6)
        assert ours.bytes == theirs.bytes
        assert ours.sent == theirs.sent
        np.testing.assert_allclose(ours.residuals, theirs.residuals, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
@pytest.mark.parametrize("text", [*FEEDBACK, "top:0.5:bfloat16"])
def test_what_is_sent_and_what_waits_is_what_went_in(text, dtype):
    is_bfloat16 = dtype == "bfloat16"
    world = World(text, 3, "torch" if is_bfloat16 else "numpy", dtype=dtype)
    went_in, came_out = np.zeros((20, 5)), np.zeros((20, 5))
    for step in range(6):
        for indices, values in gradients(step, 3):
            rounded = torch.tensor(values).to(getattr(torch, dtype)).double().numpy()
            places, own = merged(indices, rounded)
            went_in[places] += own
        mean = world.step(gradients(step, 3))
        assert is_bfloat16 or mean.dtype == dtype
        came_out += 3 * mean.astype(float)
    waits = np.sum(world.residuals, 0)
    assert np.abs(waits).max() > 1e-3
    rtol = {"float16": 3e-2, "bfloat16": 0.2, "float32": 1e-5, "float64": 1e-12}[dtype]
    np.testing.assert_allclose(came_out + waits, went_in, atol=rtol)  # of the mean itself


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("text", ["whole", "float16", "bfloat16"])
def test_each_value_is_rounded_once_and_added_in_full_precision(text, dtype):
    """In PyTorch, which has bfloat16, in which gradients stay as they are."""
    world = World(text, 3, "torch", words=6, width=2, dtype=dtype)
    twice = [4, 1, 4], [[1.0, 2.0], [0.1, -3.0], [0.5, 70000.0]]
    mean = world.step((twice, ([1], [[1e-9, 1.0]]), ([], [])))
    sent, wire = world.outcomes[0].sent, text if dtype == "float32" else dtype
    assert world.bytes[0] == 16 + 2 * 8 + 4 * (4 if wire == "whole" else 2)

    def rounded(x):
        return torch.tensor(x).to(getattr(torch, "float32" if wire == "whole" else wire)).float()

    assert torch.equal(sent[0].float(), rounded([0.1, -3.0]))
    if dtype == "float32":
        own = torch.zeros(6, 2)
        own[1], own[4] = rounded([0.1, -3.0]), rounded([1.5, 70002.0])
        assert torch.equal(sent, own[[1, 4]])
        own[1] += rounded([1e-9, 1.0])
        np.testing.assert_array_equal(mean, own / 3)
        assert np.isinf(mean).any() == (text == "float16"), "70002 is beyond float16"


@pytest.mark.parametrize("framework", ["numpy", "torch", "tensorflow"])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("text", FEEDBACK)
def test_not_a_number_reaches_all_ranks_and_no_residual(text, poison, framework):
    world = World(text, 3, framework)
    world.step(gradients(0, 3))
    before = [x.copy() for x in world.residuals]
    spoilt = [(indices, values.copy()) for indices, values in gradients(2, 3)]
    spoilt[1][1][4, 2] = poison
    assert not np.isfinite(world.step(spoilt)).all()
    np.testing.assert_array_equal(world.residuals, before)
    assert np.isfinite(world.step(gradients(2, 3))).all()
    assert not np.array_equal(world.residuals, before)


def test_a_sum_that_overflows_stays_in_no_residual():
    world = World("top:0.5", 2, words=3, width=1)
    huge = ([0, 1], [[3e38], [1.0]]), ([0], [[3e38]])
    assert np.isinf(world.step(huge)).any()
    assert not np.any(world.residuals)


@pytest.mark.parametrize("framework", ["numpy", "torch", "tensorflow"])
@pytest.mark.parametrize("text", ALL)
def test_one_rank_no_rows_and_rows_without_values(text, framework):
    assert not World(text, 2, framework).step([([], [])] * 2).any()
    one = World(text, 1, framework)
    x = np.arange(-2.0, 3.0)[None]
    np.testing.assert_allclose(one.step([([7], x)])[7] + one.residuals[0][7], x[0], atol=1e-6)
    assert World(text, 2, framework, width=0).step([([1, 3], [])] * 2).shape == (WORDS, 0)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("whole", 40 * (8 + 64 * 4)),
        ("float16", 40 * (8 + 64 * 2)),
        ("top:0.1", 4 * (8 + 64 * 4)),
        ("top:0.1:float16", 4 * (8 + 64 * 2)),
        # Every tenth of 400 rows: gaps of 9 take 4 + 1 bits by Rice codes, padded to 8 bytes.
        ("int8", 32 + 40 * (4 + 64)),
        ("float8", 32 + 40 * (4 + 64)),
        ("top:0.1:int8", 8 + 4 * (4 + 64)),
    ],
)
def test_bytes(text, size):
    world = World(text, 1, words=400, width=64)
    values = np.random.default_rng(0).standard_normal((40, 64))
    values[:4] *= 100
    world.step([(np.arange(0, 400, 10), values)])
    assert world.bytes == [16 + size]
    assert world.sent == [64 * (4 if text.startswith("top") else 40)]


def test_frames_of_coded_rows_are_checked():
    codec, random = linear(8, column=4), np.random.default_rng(0)
    x, indices = np.arange(12, dtype=np.float32), np.array([1, 5, 8])
    frame, sent = encode_sent(codec, x, random, indices, 10, packed=True, row=4)
    found, values = decode_coded(codec, frame, None, x.dtype, 10, row=4)
    assert found.tolist() == [1, 5, 8]
    np.testing.assert_array_equal(values, sent)
    for options in ({"n": 7, "row": 4}, {"n": 10, "row": 5}, {"n": 10, "row": 2}):
        with pytest.raises(PayloadError):
            decode_coded(codec, frame, None, x.dtype, **options)
    for bit in range(8 * frame.size):
        damaged = frame.copy()
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PayloadError, match="bad payload from rank 7"):
            decode_coded(codec, damaged, None, x.dtype, 10, row=4, sender="rank 7")


def test_texts():
    assert as_rows("whole") == Rows()
    assert as_rows("top:0.1:int8") == Rows(0.1, "int8")
    assert as_rows("top:1") == Rows()
    assert not as_rows("top:1").keeps_residual
    for text in ("int4", "top", "top:", "top:x", "top:0.1:int4", "top:0", "top:2", "", None, 8):
        with pytest.raises(ConfigError, match="rows"):
            TopK(rows=text)
        with pytest.raises(ConfigError, match="rows"):
            NoCompression(rows=text)


def test_methods():
    for method in (NoCompression(), TopK(), DGC(), PowerSGD()):
        assert method.rows_at(Context()) == "whole"
        assert not keeps_residual(method)
    assert (FP16().rows, BF16().rows) == ("float16", "bfloat16")
    method = as_compressor("topk:density=0.01,rows=top:0.1:int8")
    assert method == TopK(density=0.01, rows="top:0.1:int8") == from_config(method.to_config())
    words = partition(("embedding*", NoCompression(rows="int8")), otherwise=DGC())
    inner = words.for_tensor("embedding.weight", (9, 4))
    assert inner.rows_at(Context()) == "int8"
    assert keeps_residual(inner)
    assert not keeps_residual(words.for_tensor("weight", (9, 4)))
    later = switch("none", NoCompression(rows="int8"), 5)
    assert [later.rows_at(Context(step=step)) for step in (4, 5)] == ["whole", "int8"]
    assert keeps_residual(later)


def test_the_residual_is_wide():
    like = np.zeros((4, 3), np.float16)
    assert rows_state(TopK(), like) == {}
    residual = rows_state(TopK(rows="int8"), like)["residual"]
    assert (residual.shape, residual.dtype) == ((12,), np.float32)
