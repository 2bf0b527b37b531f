"""Rows of an embedding that are chosen or rounded: every framework does what NumPy does here."""

from __future__ import annotations

import math

import numpy as np

from hvd_compress import DGC, NoCompression, TopK, switch
from tests.scenarios import applies, oracle
from tests.scenarios.driver import (
    assert_close,
    assert_same_everywhere,
    barrier,
    embedding_of,
    hvd,
    make,
    train,
)


class _Oracle:
    """SGD of all ranks on the network with words, in float64; ``sent`` says what of a rank's rows
    is sent, and the rest waits."""

    def __init__(self, sent, ranks=None, momentum=0.0, passes=1):
        self.sent, self.passes, self.momentum = sent, passes, momentum
        self.ranks = list(range(hvd.size())) if ranks is None else ranks
        self.weights = oracle.initial_weights("words", "float64")
        self.velocity = {name: 0 * w for name, w in self.weights.items()}
        self.residuals = self.no_residuals()
        self.rows_sent = 0

    def no_residuals(self):
        return {rank: np.zeros_like(self.weights["embedding"]) for rank in self.ranks}

    def steps(self, steps):
        for step in steps:
            mean = {name: 0 * w for name, w in self.weights.items()}
            for rank in self.ranks:
                for name, x in self._sent(rank, step).items():
                    mean[name] += x / len(self.ranks)
            for name, w in self.weights.items():
                self.velocity[name] = self.momentum * self.velocity[name] + mean[name]
                w -= oracle.LR * self.velocity[name]
        return self

    def _sent(self, rank, step):
        parts = range(step * self.passes, (step + 1) * self.passes)
        found = [oracle.gradients("words", self.weights, rank, part) for part in parts]
        words = [oracle.batch("words", rank, part)[0] for part in parts]
        gradient = {name: sum(g[name] for g in found) for name in self.weights}
        touched, table = np.unique(words), self.residuals[rank]
        x = gradient["embedding"][touched] + table[touched]
        sent = self.sent(step, x)
        table[touched] = x - sent
        gradient["embedding"][touched] = sent
        if rank == hvd.rank():
            self.rows_sent += int(np.any(sent, axis=1).sum())
        return gradient


def _top(density):
    def sent(_, x):
        k = math.ceil(density * len(x))
        chosen = np.argsort(-np.linalg.norm(x, axis=1), kind="stable")[:k]
        mask = np.zeros((len(x), 1))
        mask[chosen] = 1
        return mask * x

    return sent


def _int8(_, x):
    scale = np.abs(x).max(1, keepdims=True) / 127
    return np.rint(x / np.where(scale > 0, scale, 1)) * scale


def _run(method, **options):
    return make(method, kind="words", dtype="float64", **{"momentum": 0.0, **options})


def the_largest_rows_are_sent() -> None:
    run = train(_run(NoCompression(rows="top:0.3")), range(8))
    expected = _Oracle(_top(0.3)).steps(range(8))
    assert_same_everywhere(run.weights())
    assert_close(run.weights(), expected.weights, 1e-7, 1e-9)
    residual = run.states()["embedding.residual"].reshape(oracle.WORDS, -1)
    np.testing.assert_allclose(residual, expected.residuals[hvd.rank()], atol=1e-9)
    found, rows = embedding_of(run), expected.rows_sent
    own = 8 * (16 + 8) + rows * (8 + 8 * oracle.DIMENSIONS)  # the sizes of messages, too
    assert found.bytes_sent == own, (found.bytes_sent, own, rows)
    assert found.elements_sent == rows * oracle.DIMENSIONS
    np.testing.assert_allclose(found.residual_norm, np.linalg.norm(residual))


def rows_of_8_bits() -> None:
    run = train(_run(NoCompression(rows="int8")), range(8))
    expected = _Oracle(_int8).steps(range(8))
    assert_same_everywhere(run.weights())
    assert_close(run.weights(), expected.weights, 1e-7, 1e-9)
    row = 8 + oracle.DIMENSIONS  # the scale and the codes; indices take a byte or two
    assert 0 < embedding_of(run).bytes_sent <= 8 * (16 + 8 + (oracle.WORDS // 2) * (row + 2) + 16)
    _spoil(run)


@applies(over=("horovod", "mpi"))
def the_largest_rows_in_8_bits() -> None:
    _spoil(train(_run(TopK(density=1.0, rows="top:0.2:float8")), range(3)))


def _spoil(run):
    """NaN on one rank reaches all, and enters no residual."""
    weights, states = run.weights(), run.states()
    assert np.any(states["embedding.residual"])
    spoilt = {name: w.copy() for name, w in weights.items()}
    if hvd.rank() == hvd.size() - 1:
        spoilt["kernel0"] *= np.nan
    run.set_weights(spoilt)
    run.step(8)
    assert not np.isfinite(run.weights()["embedding"]).all()
    for name, state in run.states().items():
        np.testing.assert_array_equal(state, states[name], err_msg=name)
    run.set_weights(weights)
    train(run, range(9, 11))
    assert all(np.isfinite(w).all() for w in run.weights().values())
    assert_same_everywhere(run.weights())


@applies(over=("horovod", "mpi"))
def one_method_and_then_another() -> None:
    """A residual goes on waiting while rows are sent whole."""
    method = switch(NoCompression(rows="int8"), NoCompression(), 3)
    run = train(_run(method), range(6))
    expected = _Oracle(_int8).steps(range(3))
    waits, expected.residuals = expected.residuals, expected.no_residuals()
    expected.sent = lambda _, x: x
    expected.steps(range(3, 6))
    assert_close(run.weights(), expected.weights, 1e-7, 1e-9)
    residual = run.states()["embedding.residual"].reshape(oracle.WORDS, -1)
    np.testing.assert_allclose(residual, waits[hvd.rank()], atol=1e-9)


@applies(over=("horovod", "mpi"))  # shared.py has dense gradients of words in the others
def dense_gradients_know_nothing_of_rows() -> None:
    method = NoCompression(rows="top:0.1")
    run = train(_run(method, sparse_as_dense=True), range(4))
    expected = oracle.dense(range(4), hvd.size(), kind="words", dtype="float64", momentum=0.0)
    assert_close(run.weights(), expected, 1e-7, 1e-9)
    assert not any(np.any(x) for x in run.states().values())


@applies(over=("horovod", "mpi"))  # tests/core/test_rows.py has the other frameworks
def momentum_acts_behind_them_and_passes_before() -> None:
    """Momentum, DGC's, which is not in the optimizer, is that of the average of what was sent."""
    for method, options, more, passes in (
        (DGC(density=1.0, rows="top:0.5"), {"momentum": 0.9}, {}, 1),
        (NoCompression(rows="top:0.5"), {}, {"backward_passes_per_step": 2}, 2),
    ):
        run = train(_run(method, **options, **more), range(5), passes=passes)
        expected = _Oracle(_top(0.5), passes=passes, **options).steps(range(5))
        assert_same_everywhere(run.weights())
        assert_close(run.weights(), expected.weights, 1e-6, 1e-8)


@applies(least=3)  # a set needs somebody outside; sizes 3 and more run this
def a_set_of_processes() -> None:
    members = list(range(hvd.size() - 1))
    subset = hvd.add_process_set(members)
    try:
        run = train(_run(NoCompression(rows="top:0.3"), process_set=subset), range(4))
        ranks = members if hvd.rank() in members else [hvd.rank()]
        expected = _Oracle(_top(0.3), ranks=ranks).steps(range(4))
        assert_close(run.weights(), expected.weights, 1e-7, 1e-9)
        barrier()
    finally:
        hvd.remove_process_set(subset)
