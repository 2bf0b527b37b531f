"""Training follows the oracle, in every framework: what must hold at any number of ranks."""

from __future__ import annotations

from hvd_compress import (
    BF16,
    DGC,
    FP8,
    FP16,
    LGC,
    QSGD,
    EFSignSGD,
    GTopK,
    MSTopK,
    NoCompression,
    OneBit,
    PowerSGD,
    RandomK,
    ScaleCom,
    SIDCo,
    Signum,
    SketchedSGD,
    Threshold,
    TopK,
    allgather,
    chain,
    error_feedback,
    natural_dithering,
    partition,
    rule,
    switch,
    top_k,
)
from scenarios import oracle
from scenarios.driver import (
    assert_close,
    assert_same_everywhere,
    hvd,
    make,
    over,
    train,
)

DENSE = DGC(density=1.0)  # momentum SGD, through all of DGC's machinery
SPARSE = DGC(density=0.05)
LEARNED = LGC(density=0.05, learn=1, code=3)
LOW_RANK = PowerSGD(rank=2, min_compression_rate=1)
METHODS = (
    *(NoCompression(), FP16(), BF16(), TopK(density=0.05), RandomK(density=0.1), DENSE, SPARSE),
    *(LOW_RANK, OneBit(), OneBit(via="allgather"), QSGD(), FP8(), Signum()),
    chain(error_feedback(), via=allgather(top_k(0.05), natural_dithering())),
    *(Threshold(), MSTopK(density=0.05), SIDCo(density=0.05), ScaleCom(density=0.05)),
    *(SketchedSGD(density=0.05), GTopK(density=0.05), LEARNED),
)
#: of each kind of request one, where a graph has to be traced for each on many ranks
KINDS = (
    *(BF16(), SPARSE, LOW_RANK, OneBit(), SIDCo(density=0.05), ScaleCom(density=0.05)),
    GTopK(density=0.05),
)


def steps(number: int) -> range:
    """Each rank computes the oracle for all ranks: of many ranks, fewer steps."""
    return range(number if hvd.size() <= 4 else number // 3)


def fifty_steps_follow_the_oracle() -> None:
    """In double precision the frameworks' own rounding cannot turn a choice of elements."""
    for method, nesterov in ((SPARSE, False), (SPARSE, True), (TopK(density=0.05), False)):
        # Keras rounds the momentum to float32: one that is the same in both.
        options = {"dtype": "float64", "momentum": 0.875, "nesterov": nesterov}
        run = train(make(method, **options), steps(50))
        assert_same_everywhere(run.weights())
        expected = oracle.compressed(method, steps(50), hvd.size(), **options)
        assert_close(run.weights(), expected, rtol=1e-6, atol=1e-8)


def fifty_steps_in_single_precision() -> None:
    """A choice may turn where two elements are as good as equal; hence the tolerance."""
    run = train(make(SPARSE), steps(50))
    assert_same_everywhere(run.weights())
    assert_close(run.weights(), oracle.compressed(SPARSE, steps(50), hvd.size()), 1e-3, 1e-4)


def dgc_at_density_one_is_momentum_sgd_everywhere() -> None:
    run = train(make(DENSE), range(8))
    assert_close(run.weights(), oracle.dense(range(8), hvd.size()))


def ranks_stay_equal() -> None:
    for method in METHODS if over in ("horovod", "mpi") or hvd.size() <= 2 else KINDS:
        run = train(make(method), range(4))
        assert_same_everywhere(run.weights())


def two_rounds_follow_the_oracle() -> None:
    """Convolutions and linear layers have their outputs first in torch and last in TensorFlow: the
    power method then begins on another side, and finds the same after some steps only."""
    run = train(make(LOW_RANK, dtype="float64", momentum=0.0), range(20))
    assert_same_everywhere(run.weights())
    expected = oracle.compressed(
        as_laid_out(LOW_RANK), range(20), hvd.size(), dtype="float64", momentum=0.0
    )
    assert_close(run.weights(), expected, 1e-6, 1e-8)
    later = PowerSGD(rank=2, min_compression_rate=1, start=3)
    run = train(make(later, dtype="float64", momentum=0.0), range(3))
    expected = oracle.dense(range(3), hvd.size(), dtype="float64", momentum=0.0)
    assert_close(run.weights(), expected, 1e-6, 1e-8)


def quantised_sums_follow_the_oracle() -> None:
    for method in (OneBit(column=16), OneBit(start=2), EFSignSGD(), FP8()):
        run = train(make(method, dtype="float64", momentum=0.0), steps(12))
        assert_same_everywhere(run.weights())
        expected = oracle.compressed(
            as_laid_out(method), steps(12), hvd.size(), dtype="float64", momentum=0.0
        )
        assert_close(run.weights(), expected, 1e-6, 1e-8)


def as_laid_out(method):
    """What a method does depends on where the framework has a layer's outputs."""
    return Turned(method) if over in ("horovod", "mpi") else method


def merging_and_learning_follow_the_oracle() -> None:
    server = LGC(density=0.05, learn=0, code=3, via="server", decoders=2, innovation=0.05)
    for method in (GTopK(density=0.05), LEARNED, server):
        momentum = 0.875 if method.takes_momentum else 0.0
        run = train(make(method, dtype="float64", momentum=momentum), range(6))
        assert_same_everywhere(run.weights())
        expected = oracle.compressed(
            as_laid_out(method), range(6), hvd.size(), dtype="float64", momentum=momentum
        )
        assert_close(run.weights(), expected, 1e-6, 1e-8)


def compositions_follow_the_oracle() -> None:
    matrices = rule(OneBit(column=16), ndim=2)
    for method in (
        partition(matrices, otherwise=FP8()),
        partition(rule(SPARSE, ndim=2), otherwise="none"),
        switch("none", TopK(density=0.05), 3),
        switch(partition(matrices), TopK(density=0.05), 3),
    ):
        momentum = 0.875 if method.takes_momentum else 0.0
        run = train(make(method, dtype="float64", momentum=momentum), range(7))
        assert_same_everywhere(run.weights())
        expected = oracle.compressed(
            as_laid_out(method), range(7), hvd.size(), dtype="float64", momentum=momentum
        )
        assert_close(run.weights(), expected, 1e-6, 1e-8)


class Turned:
    """A method on transposed matrices."""

    def __init__(self, method) -> None:
        self.method = method
        self.takes_momentum = method.takes_momentum

    def for_tensor(self, name, shape):
        return Turned(self.method.for_tensor(name, shape[::-1]))

    def init(self, gradient):
        return self.method.init(gradient.T)

    def exchange(self, gradient, state, context):
        outcome = yield from self.method.exchange(gradient.T, state, context)
        return outcome._replace(mean=outcome.mean.T, update=outcome.direction.T)
