"""The values that options are converted to, and what follows from them without being said."""

import dataclasses

import numpy as np
import pytest

from hvd_compress import (
    DGC,
    EF21,
    After,
    ConfigError,
    ExponentialWarmup,
    OneBitAdamCompression,
    PowerSGD,
    RandomK,
    StagedWarmup,
    Threshold,
    TopK,
    partition,
    switch,
)
from hvd_compress.base import Compressor, Context
from hvd_compress.blocks import (
    Codec,
    allgather,
    allreduce,
    alltoall,
    chain,
    clip_by_local_norm,
    contraction,
    dense_until,
    error_feedback,
    linear,
    majority_vote,
    natural,
    plus_minus,
    random_k,
    rounding,
    sign,
    threshold,
    top_k,
)
from hvd_compress.chain import Chain


def test_options_convert_themselves():
    assert EF21(start=3).start == dense_until(3, allgather()).start == After("step", 3)
    assert OneBitAdamCompression(freeze_step=True).freeze_step is True
    assert rounding(levels=[1.0, 2.0]).levels == (1.0, 2.0)
    assert Chain([error_feedback()], allgather()) == chain(error_feedback(), via=allgather())
    with pytest.raises(ConfigError, match="start must be"):
        dataclasses.replace(PowerSGD(start=3), start=-1)


@pytest.mark.parametrize(
    "make",
    [
        *(DGC, TopK, RandomK, EF21),
        lambda density: chain(via=allgather(top_k(density), natural())),
        lambda density: chain(via=allreduce(select=random_k(density))),
        lambda density: partition(("*.bias", "none"), otherwise=TopK(density)),
        lambda density: switch("none", TopK(density), 5),
    ],
    ids=["dgc", "topk", "randomk", "ef21", "gathered", "summed", "partition", "switch"],
)
def test_who_has_a_density_by_epoch_needs_epochs(make):
    for schedule in (StagedWarmup, ExponentialWarmup):
        assert schedule("epoch").needs_epoch
        assert make(schedule("epoch")).needs_epoch
        assert not make(schedule("step")).needs_epoch
    assert not make(0.1).needs_epoch


@pytest.mark.parametrize(
    "method",
    [
        PowerSGD(start=After("epoch", 2)),
        chain(via=dense_until(After("epoch", 1), alltoall(linear()))),
        switch("none", switch("none", TopK, After("epoch", 1)), 5),
    ],
    ids=repr,
)
def test_who_begins_by_epoch_needs_epochs(method):
    assert method.needs_epoch


@pytest.mark.parametrize(
    "method",
    [
        Threshold(),
        DGC(clip_norm=1.0),
        chain(via=allgather(threshold(0.5))),
        chain(via=allgather(top_k(), plus_minus(0.1))),
        chain(majority_vote(), via=allgather(sign())),
        chain(clip_by_local_norm(1.0), via=allgather()),
        chain(via=dense_until(3, alltoall(contraction(rounding(3.0))))),
        partition(otherwise=Threshold()),
        switch("none", Threshold(), 3),
    ],
    ids=repr,
)
def test_one_part_in_units_of_the_gradient_is_enough(method):
    assert not method.homogeneous
    assert chain(error_feedback(), via=alltoall(linear())).homogeneous


def test_codecs_of_users_are_parts_too():
    class Bare(Compressor):
        init = exchange = per_rank = None  # type: ignore[assignment]

    @dataclasses.dataclass(frozen=True)
    class Users(Bare):
        codec: Codec

    assert Users(natural()).homogeneous
    assert not Users(sign()).homogeneous


def test_what_bindings_ask_of_any_method():
    x, context = np.zeros((40, 50), np.float32), Context()
    for method in (DGC(), TopK(), PowerSGD(), OneBitAdamCompression()):
        assert isinstance(method.chain(x, context), Chain)
        assert isinstance(method.template(x), Chain)
    chained = chain(clip_by_local_norm(1.0), via=allgather())
    assert chained.chain(x, context) is chained.template(x) is chained
    assert chained.transforms == (clip_by_local_norm(1.0),)
    assert switch("none", TopK, 3).transforms == ()
    assert (TopK().momentum, TopK().nesterov, TopK().weight_decay) == (None, None, None)
    assert (DGC(momentum=0.5).momentum, DGC().weight_decay) == (0.5, "separate")
