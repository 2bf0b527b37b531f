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
    NoCompression,
    OneBit,
    PowerSGD,
    RandomK,
    ScaleCom,
    Signum,
    Threshold,
    TopK,
    partition,
    rule,
    switch,
)
from hvd_compress.blocks import allgather, chain, error_feedback, natural_dithering, top_k
from tests.ring_method import Ring
from tests.scenarios import applies, oracle
from tests.scenarios.driver import (
    assert_close,
    assert_same_everywhere,
    everything,
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
    RandomK(density=0.1, shared=False),
    *(LOW_RANK, OneBit(), OneBit(via="allgather"), QSGD(), FP8(), Signum()),
    chain(error_feedback(), via=allgather(top_k(0.05), natural_dithering())),
    *(Threshold(), ScaleCom(density=0.05)),
    LEARNED,
)
#: of each kind of request one, where a graph has to be traced for each on many ranks
KINDS = (*(BF16(), SPARSE, LOW_RANK, OneBit(), ScaleCom(density=0.05)),)


def follow_the_oracle(
    method, steps: int, momentum: float | None = None, tape: bool = False, **options
) -> None:
    """In double precision the frameworks' own rounding cannot turn a choice of elements.

    One rank compares for all, once they are known to be equal: the oracle does all ranks' work.
    """
    if momentum is None:
        # Keras rounds it to float32: one that is the same in both.
        momentum = 0.875 if method.takes_momentum else 0.0
    options |= {"dtype": "float64", "momentum": momentum}
    run = train(make(method, tape=tape, **options), range(steps))
    assert_same_everywhere(run.weights())
    if hvd.rank() == 0:
        laid_out = as_laid_out(method)
        expected = oracle.compressed(laid_out, range(steps), hvd.size(), **options)
        assert_close(run.weights(), expected, rtol=1e-6, atol=1e-8)


def as_laid_out(method):
    """The result of a method depends on where the framework has a layer's outputs: convolutions and
    linear layers have them first in torch and last in TensorFlow."""
    return Turned(method) if over in ("horovod", "mpi") else method


def dgc_and_top_k_follow_the_oracle() -> None:
    for nesterov in (False, True) if everything else (True,):
        follow_the_oracle(SPARSE, 12, nesterov=nesterov)
    follow_the_oracle(TopK(density=0.05), 12, momentum=0.875)


@applies(over=("tensorflow",))
def tapes_follow_the_oracle() -> None:
    """They exchange as optimizers do, which have the other kinds of requests."""
    follow_the_oracle(SPARSE, 8, tape=True)
    follow_the_oracle(Ring(equal=False), 3, tape=True)


def neighbours_and_broadcasts_follow_the_oracle() -> None:
    for equal in (True, False):
        follow_the_oracle(Ring(equal), 3)


def single_precision_follows_the_oracle() -> None:
    """A choice may turn where two elements are as good as equal; hence the tolerance."""
    run = train(make(SPARSE), range(20))
    assert_same_everywhere(run.weights())
    if hvd.rank() == 0:
        expected = oracle.compressed(SPARSE, range(20), hvd.size())
        assert_close(run.weights(), expected, 1e-3, 1e-4)


def ranks_stay_equal() -> None:
    all_of_them = over in ("horovod", "mpi") or (over == "tensorflow" and hvd.size() <= 2)
    for method in METHODS if all_of_them else KINDS:
        run = train(make(method), range(4))
        assert_same_everywhere(run.weights())


def two_rounds_follow_the_oracle() -> None:
    later = PowerSGD(rank=2, min_compression_rate=1, start=3)
    for method in (LOW_RANK, later) if everything else (later,):
        follow_the_oracle(method, 8)


def quantised_sums_follow_the_oracle() -> None:
    rows = (OneBit(column=16), OneBit(start=2), EFSignSGD(), FP8())
    for method in rows if everything else rows[1::2]:
        follow_the_oracle(method, 8)


def learning_follows_the_oracle() -> None:
    server = LGC(density=0.05, learn=0, code=3, via="server", decoders=2, innovation=0.05)
    for method in (LEARNED, server) if everything else (LEARNED,):
        follow_the_oracle(method, 6)


def compositions_follow_the_oracle() -> None:
    matrices = rule(OneBit(column=16), ndim=2)
    for method in (
        partition(matrices, otherwise=FP8()),
        partition(rule(SPARSE, ndim=2), otherwise="none"),
        switch("none", TopK(density=0.05), 3),
        switch(partition(matrices), TopK(density=0.05), 3),
    ):
        follow_the_oracle(method, 7)


class Turned:
    """A method on transposed matrices."""

    def __init__(self, method) -> None:
        self.method = method
        self.takes_momentum = method.takes_momentum
        self.needs_gradient_norm = method.needs_gradient_norm

    def for_tensor(self, name, shape):
        return Turned(self.method.for_tensor(name, shape[::-1]))

    def init(self, gradient):
        return self.method.init(gradient.T)

    def exchange(self, gradient, state, context):
        outcome = yield from self.method.exchange(gradient.T, state, context)
        return outcome._replace(mean=outcome.mean.T, update=outcome.direction.T)
