"""Options and corner cases, in every framework: the same functions run over all of them."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from hvd_compress import (
    BF16,
    DGC,
    FP16,
    NoCompression,
    RandomK,
    SignSGD,
    Signum,
    StagedWarmup,
    TopK,
    switch,
)
from hvd_compress.errors import ConfigError
from tests.scenarios import applies, oracle, refused
from tests.scenarios.driver import (
    adam,
    assert_close,
    assert_same_everywhere,
    barrier,
    embedding_of,
    everything,
    hvd,
    make,
    mismatch,
    over,
    raises,
    set_step,
    train,
)
from tests.scenarios.environment import logged

DENSE = DGC(density=1.0)  # momentum SGD, through all of DGC's machinery
SPARSE = DGC(density=0.05)


#: what the oracle follows to the last digits
EXACT = {"dtype": "float64", "momentum": 0.875}


def warmups() -> None:
    rows = [("epoch", 0.5, 0.25), ("step", 2, None), ("epoch", 2, 1)]
    for unit, length, announced in rows if everything else rows[:1]:
        method = DGC(density=StagedWarmup(unit, length, (1.0, 0.25, 0.02)), min_size=0)
        run = make(method, **EXACT)
        for step in range(8):
            if announced:
                run.compression.set_epoch(announced * step)
            run.step(step)
        assert_same_everywhere(run.weights())
        method = DGC(StagedWarmup("step", 2, (1.0, 0.25, 0.02)), min_size=0)
        expected = oracle.compressed(method, range(8), hvd.size(), **EXACT)
        assert_close(run.weights(), expected, 1e-6, 1e-8)


def votes_are_the_same_in_sums() -> None:
    small = {"lr": oracle.LR / 50}
    for method in (Signum(), SignSGD()) if everything else ():  # the other takes turns below
        total = train(make(method, op=hvd.Sum, **small), range(3))
        assert_close(total.weights(), train(make(method, **small), range(3)).weights(), 0, 0)
    # What takes turns with votes is a sum when its turn comes.
    method = switch(SignSGD(), NoCompression(), 2)
    total, mean = (make(method, op=op, momentum=0.0, **small) for op in (hvd.Sum, hvd.Average))
    before = train(total, range(2)).weights()
    assert_close(train(mean, range(2)).weights(), before, 0, 0)
    step, longer = (train(run, range(2, 3)).weights() for run in (mean, total))
    for name, w in before.items():
        np.testing.assert_allclose(longer[name] - w, hvd.size() * (step[name] - w), 1e-2, 1e-5)


def other_operations_and_wrong_factors_are_refused() -> None:
    """By what each engine calls its operations: Horovod's are numbers, MPI's are names."""
    predivided = {"op": hvd.Sum, "gradient_predivide_factor": 2.0}
    refused(
        ConfigError,
        (lambda: make(DGC, op=hvd.Adasum), "Adasum"),
        (lambda: make(DGC, op=hvd.Max), "op must be"),
        (lambda: make(DGC, **predivided), "gradient_predivide_factor"),
        (lambda: make(DGC, seed=0.5), "seed must be a whole number"),
    )


def options_of_the_exchange_change_nothing() -> None:
    """Steps are those of the oracle, which knows none of them."""
    size = hvd.size()
    summed = {"op": hvd.Sum, "lr": oracle.LR / size}
    predivided = {"gradient_predivide_factor": float(size)}
    rows: list[tuple[Any, dict[str, Any]]] = [
        (SPARSE, summed),
        *((method, predivided) for method in (SPARSE, NoCompression())),
        *((SPARSE, {"groups": 1}), (TopK(density=0.05), {"groups": "two"})),
    ]
    if everything:
        rows += [(FP16(), summed), (DENSE, summed), (DENSE, predivided)]
        rows += [(SPARSE, {"groups": n}) for n in (2, 100, "two")]
        rows += [(DENSE, {"groups": n}) for n in (1, 2)]
    for method, options in rows:
        run = train(make(method, **(EXACT | options)), range(5))
        assert_same_everywhere(run.weights())
        expected = oracle.compressed(method, range(5), size, **EXACT)
        # Of sums in 16 bits, not their means are rounded.
        near = (1e-3, 1e-4) if method == FP16() else (1e-6, 1e-8)
        assert_close(run.weights(), expected, *near)


@applies(over=("horovod", "mpi", "tensorflow"))  # a tape has one pass
def several_backward_passes() -> None:
    run = make(DENSE, backward_passes_per_step=2, lr=0.02)
    train(run, range(5), passes=2)
    assert_close(run.weights(), oracle.dense(range(5), hvd.size(), lr=0.02, passes=2))


@applies(least=3)  # a set needs somebody outside; sizes 3 and more run this
def a_set_of_processes() -> None:
    members = list(range(hvd.size() - 1))
    subset = hvd.add_process_set(members)
    try:
        for method in (DENSE, SPARSE):
            run = train(make(method, process_set=subset), range(5))
            if hvd.rank() in members:
                assert_same_everywhere(run.weights(), subset)
            if method is DENSE:  # who is outside trains alone, with its momentum
                ranks = members if hvd.rank() in members else [hvd.rank()]
                assert_close(run.weights(), oracle.dense(range(5), ranks))
            barrier()
    finally:
        hvd.remove_process_set(subset)


def rows_of_an_embedding() -> None:
    """Duplicates are merged and rows travel without loss: dense training in fewer bytes."""
    run = train(make(DENSE, kind="words"), range(6))
    assert_same_everywhere(run.weights())
    assert_close(run.weights(), oracle.dense(range(6), hvd.size(), kind="words"))
    embedding = embedding_of(run)
    row = oracle.DIMENSIONS * 4 + 8  # and its index
    assert embedding.bytes_sent <= 6 * ((oracle.WORDS // 2) * row + 32)


def rows_in_half_precision() -> None:
    """Values of rows in 16 bits, the numbers of the rows as they are."""
    whole = oracle.dense(range(6), hvd.size(), kind="words", momentum=0.0)
    for method, near in ((FP16(), 2e-3), (BF16(), 2e-2)) if everything else ((BF16(), 2e-2),):
        run = train(make(method, kind="words", momentum=0.0), range(6))
        assert_same_everywhere(run.weights())
        assert_close(run.weights(), whole, rtol=near, atol=near)
        row = oracle.DIMENSIONS * 2 + 8
        assert embedding_of(run).bytes_sent <= 6 * ((oracle.WORDS // 2) * row + 32)


def rows_as_dense() -> None:
    run = train(make(DENSE, kind="words", sparse_as_dense=True), range(6))
    assert_close(run.weights(), oracle.dense(range(6), hvd.size(), kind="words"))


def a_nonfinite_step_leaves_no_trace() -> None:
    """NaN on one rank reaches all, and enters no state."""
    methods = [DGC(density=0.05, clip_norm=1.0), SPARSE, TopK(density=0.05)]
    for method in methods if everything else methods[:1]:  # graphs.py has the others, with NaN
        run = train(make(method, momentum=0.9 if method.takes_momentum else 0.0), range(3))
        weights, states = run.weights(), run.states()
        run.step(3, spoilt=hvd.rank() == hvd.size() - 1)
        assert all(not np.isfinite(w).all() for w in run.weights().values())
        for name, state in run.states().items():
            np.testing.assert_array_equal(state, states[name], err_msg=name)
        run.set_weights(weights)
        train(run, range(4, 6))
        assert all(np.isfinite(w).all() for w in run.weights().values())
        assert_same_everywhere(run.weights())


@applies(least=2)  # one rank has nobody to differ from
def ranks_that_differ_all_say_so() -> None:
    """Every rank raises, with both sides, instead of waiting or drifting apart."""
    odd = hvd.rank() == 1

    def fails(what: str, here: str, there: str, method: Any, **options: Any) -> None:
        step = options.pop("at_step", None)
        with raises(mismatch, "the ranks differ", f"  {what}", f"rank 0.*: {here}", f"1: {there}"):
            run = make(method, **options)
            try:
                if step is not None:
                    set_step(run, step)
                run.step(0)
            finally:
                if over == "mpi":  # what has left cannot be called back
                    run.compression.abandon()
                    run.compression.engine.close()

    fails("method", "FP16", "TopK", TopK(density=0.05) if odd else FP16())
    fails("op", "Average", "Sum", FP16(), op=hvd.Sum if odd else hvd.Average)
    fails("momentum", ".*0.9", ".*0.5", DENSE, momentum=0.5 if odd else 0.9)
    fails("step", "0", "3", RandomK(density=0.1), at_step=3 * odd)
    if everything:  # the terms of which no framework knows more than the others
        density = 0.1 if odd else 0.05
        fails("method", "DGC.density=0.05", "DGC.density=0.1", DGC(density=density))
        fails("gradient_predivide", "2.0", "1.0", FP16(), gradient_predivide_factor=2.0 - odd)
        fails("seed", "0", "7", RandomK(density=0.1), seed=7 * odd)
    if over in ("horovod", "mpi"):  # keras_common.py has those of TensorFlow
        groups = "two" if odd else None  # each rank would wait for a bucket that others do not make
        fails("groups", "nothing", ".*0.weight, 0.bias", SPARSE, groups=groups)
    if over == "mpi":
        fails("backward_passes_per_step", "1", "2", DGC, backward_passes_per_step=1 + odd)
    # And afterwards all goes on.
    assert_same_everywhere(train(make(SPARSE), range(2)).weights())


def seeds_differ() -> None:
    method = RandomK(density=0.1, error_feedback=False)
    # Keras gives every model other names, and so other draws.
    seeds = (0, 1, 0) if over in ("horovod", "mpi") else (0, 1)
    runs = [train(make(method, momentum=0.0, seed=seed), range(2)) for seed in seeds]
    first, other, *same = (np.concatenate([*map(np.ravel, r.weights().values())]) for r in runs)
    assert tuple(run.compression.seed for run in runs) == seeds
    assert (first != other).any()
    for each in same:
        np.testing.assert_array_equal(first, each)


def bytes_are_counted() -> None:
    size = hvd.size()
    run = train(make(NoCompression()), range(2))
    dense = sum(4 * w.size for w in run.weights().values())
    total = run.compression.stats().total
    assert total.steps == 2
    assert total.dense_bytes == total.bytes_sent == 2 * dense
    assert total.bytes_received == (2 * dense if size > 1 else 0)
    run = train(make(TopK(density=0.05, indices="int32")), range(2))
    total = run.compression.stats().total
    k = sum(-(-w.size // 20) for w in run.weights().values())
    assert total.elements_sent == 2 * k
    # A bucket has one header, a graph one for each tensor.
    headers = total.bytes_sent // 2 - 8 * k
    assert headers in (16, 16 * len(run.weights()))
    assert total.bytes_sent == 2 * (headers + 8 * k)
    assert total.bytes_received == total.bytes_sent * (size - 1)
    assert total.residual_norm > 0


@applies(over=("horovod", "mpi", "tensorflow"))  # a tape knows no momentum
def momentum_moves_and_says_so() -> None:
    with logged() as lines, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(DGC)
        make(DGC, optimizer=adam)
        make(DGC(momentum=0.0), optimizer=adam)  # said on purpose
    warned = [str(w.message) for w in caught if w.category is UserWarning]
    if hvd.rank() == 0:
        assert [line for line in lines if "momentum 0.9 of SGD now acts inside dgc" in line], lines
        assert len(warned) == 1, warned
        assert "DGC(momentum=0.0)" in warned[0]
    with raises(ConfigError, "two momenta"):
        make(DGC(momentum=0.5))


@applies(over=("horovod", "mpi", "tensorflow"))
def another_optimizer_trains() -> None:
    method = TopK(density=0.05)
    run = train(make(method, optimizer=adam, lr=0.001), range(4))
    assert_same_everywhere(run.weights())
