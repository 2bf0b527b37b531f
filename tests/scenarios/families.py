"""Every method, whatever the framework; on top of ``parity``, which is cheaper."""

from __future__ import annotations

from hvd_compress import (
    BF16,
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
from scenarios.driver import assert_close, assert_same_everywhere, hvd, make, train
from scenarios.parity import DENSE, LEARNED, LOW_RANK, SPARSE, follow_the_oracle

METHODS = (
    *(NoCompression(), FP16(), BF16(), TopK(density=0.05), RandomK(density=0.1), DENSE, SPARSE),
    *(LOW_RANK, OneBit(), OneBit(via="allgather"), QSGD(), FP8(), Signum()),
    chain(error_feedback(), via=allgather(top_k(0.05), natural_dithering())),
    *(Threshold(), MSTopK(density=0.05), SIDCo(density=0.05), ScaleCom(density=0.05)),
    *(SketchedSGD(density=0.05), GTopK(density=0.05), LEARNED),
)


def ranks_stay_equal_under_every_method() -> None:
    for method in METHODS:
        run = train(make(method), range(4))
        assert_same_everywhere(run.weights())


def two_rounds_follow_the_oracle() -> None:
    follow_the_oracle(LOW_RANK, 20)
    later = PowerSGD(rank=2, min_compression_rate=1, start=3)
    run = train(make(later, dtype="float64", momentum=0.0), range(3))
    expected = oracle.dense(range(3), hvd.size(), dtype="float64", momentum=0.0)
    assert_close(run.weights(), expected, 1e-6, 1e-8)


def quantised_sums_follow_the_oracle() -> None:
    for method in (OneBit(column=16), OneBit(start=2), EFSignSGD(), FP8()):
        follow_the_oracle(method, 12)


def merging_and_learning_follow_the_oracle() -> None:
    server = LGC(density=0.05, learn=0, code=3, via="server", decoders=2, innovation=0.05)
    for method in (GTopK(density=0.05), LEARNED, server):
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
