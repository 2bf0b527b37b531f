"""Spellings, methods, and agreement with references that know nothing of Horovod."""

from __future__ import annotations

import horovod.torch
import torch

from hvd_compress.blocks import allgather, chain, error_feedback, momentum_correction, top_k
from hvd_compress.torch import BF16, DGC, FP16, NoCompression, RandomK, Signum, TopK
from tests.devices import DEVICE
from tests.scenarios import horovod_only
from tests.scenarios.common import (
    LR,
    assert_close,
    assert_same_everywhere,
    dense_reference,
    distribute,
    lockstep_reference,
    make_model,
    sgd,
    train,
)
from tests.scenarios.driver import hvd

METHODS = [
    NoCompression(),
    FP16(),
    BF16(),
    TopK(density=0.05),
    RandomK(density=0.1),
    DGC(density=0.05),
    DGC(density=0.05, values="float16", clip_norm=1.0),
]


@horovod_only
def all_spellings_work_and_agree() -> None:
    results = []
    for module in (hvd, horovod.torch):
        for compression in (DGC, DGC(), "dgc", DGC(density=0.001)):
            model = make_model()
            optimizer = module.DistributedOptimizer(
                sgd(model), named_parameters=model.named_parameters(), compression=compression
            )
            train(model, optimizer, range(3))
            assert optimizer.compression.method == DGC()
            results.append(model)
    for model in results[1:]:
        for p, q in zip(model.parameters(), results[0].parameters(), strict=True):
            assert torch.equal(p, q)


@horovod_only
def everything_of_horovod_is_there() -> None:
    wrapped = {"init", "DistributedOptimizer", "broadcast_optimizer_state", "join"}
    wrapped |= {"allreduce", "grouped_allreduce", "reducescatter", "grouped_reducescatter"}
    inside = {"check_extension", "compression", "functions", "mpi_lib_v2", "mpi_ops", "optimizer"}
    inside |= {"sync_batch_norm"}
    for name in dir(horovod.torch):
        if not name.startswith("_"):
            assert getattr(hvd, name) is getattr(horovod.torch, name), name
            assert (name in dir(hvd)) is not (name in inside), name
            assert name in wrapped or not hasattr(getattr(hvd, name), "__wrapped__"), name


@horovod_only
def other_compression_passes_through() -> None:
    for compression in (horovod.torch.Compression.none, horovod.torch.Compression.fp16):
        model, reference = make_model(), make_model()
        optimizer = horovod.torch.DistributedOptimizer(
            sgd(model), named_parameters=model.named_parameters(), compression=compression
        )
        assert not hasattr(optimizer, "compression")
        train(model, optimizer, range(3))
        dense_reference(reference, sgd(reference), range(3))
        assert_close(model, reference, rtol=1e-2, atol=1e-3)


def ranks_stay_bitwise_equal_under_every_method() -> None:
    for method in METHODS:
        model = make_model()
        optimizer = distribute(sgd(model, weight_decay=1e-3), model, method)
        train(model, optimizer, range(20))
        assert_same_everywhere(model)


def no_compression_is_momentum_sgd() -> None:
    for options in ({}, {"nesterov": True}, {"weight_decay": 0.01}, {"momentum": 0.0}):
        model, reference = make_model(), make_model()
        train(model, distribute(sgd(model, **options), model, NoCompression()), range(15))
        dense_reference(reference, sgd(reference, **options), range(15))
        assert_close(model, reference)


def dgc_at_density_one_is_momentum_sgd() -> None:
    for options in (
        {},
        {"nesterov": True},
        {"weight_decay": 0.01},
        {"weight_decay": 0.01, "nesterov": True},
        {"momentum": 0.0, "weight_decay": 0.01},
        {"maximize": True, "weight_decay": 0.01},
        {"foreach": False},
    ):
        for decay in ("separate", "gradient"):
            model, reference = make_model(), make_model()
            method = DGC(density=1.0, weight_decay=decay)
            train(model, distribute(sgd(model, **options), model, method), range(15))
            dense_reference(reference, sgd(reference, **options), range(15))
            assert_close(model, reference)


def sparse_methods_follow_the_lockstep_world() -> None:
    for method in (DGC(density=0.05), DGC(density=0.02, values="float16"), DGC(momentum=0.5)):
        for nesterov in (False, True):
            momentum = 0.9 if method.momentum is None else 0.0
            model, reference = make_model(), make_model()
            options = {"nesterov": True} if nesterov and momentum else {}
            optimizer = distribute(sgd(model, momentum=momentum, **options), model, method)
            train(model, optimizer, range(12))
            lockstep_reference(reference, method, 12, momentum=momentum, nesterov=bool(options))
            assert_close(model, reference)


def gathered_averages_have_the_bits_of_the_lockstep_world() -> None:
    """One exchange: what the ranks add up, they add in rank order."""
    for method in (TopK(density=0.05, error_feedback=False), DGC(density=0.05)):
        model, other = make_model(), make_model()
        optimizer = distribute(sgd(model, momentum=0.0), model, method)
        train(model, optimizer, range(1))
        lockstep_reference(other, method, 1, momentum=0.0)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            if p.dim() > 1 and p.numel() >= 1024:
                assert torch.equal(p, q)


def separate_weight_decay_follows_its_formula() -> None:
    wd, m = 0.05, 0.9
    for nesterov in (False, True):
        buffers: dict[str, torch.Tensor] = {}

        def direction(name, p, g, nesterov=nesterov, buffers=buffers):
            q = buffers[name] = m * buffers.get(name, torch.zeros_like(p)) + wd * p.detach()
            return g + (wd * p.detach() + m * q if nesterov else q)

        model, reference = make_model(), make_model()
        optimizer = distribute(
            sgd(model, weight_decay=wd, nesterov=nesterov), model, DGC(density=0.05)
        )
        train(model, optimizer, range(10))
        lockstep_reference(reference, DGC(density=0.05), 10, nesterov=nesterov, direction=direction)
        assert_close(model, reference)


def decay_beside_votes_does_not_add_up() -> None:
    """w = w - lr (vote + wd w), as in the paper: votes have the size of one step, whatever beta."""
    wd = 0.05
    for nesterov in (False, True):
        model, reference = make_model(), make_model()
        optimizer = distribute(sgd(model, weight_decay=wd, nesterov=nesterov), model, Signum())
        train(model, optimizer, range(10))
        lockstep_reference(
            reference,
            Signum(),
            10,
            nesterov=nesterov,
            direction=lambda name, p, g: g + wd * p.detach(),
        )
        assert_close(model, reference)


def top_k_leaves_momentum_to_the_optimizer() -> None:
    velocities: dict[str, torch.Tensor] = {}

    def direction(name, p, g):
        velocities[name] = 0.9 * velocities.get(name, torch.zeros_like(p)) + g
        return velocities[name]

    model, reference = make_model(), make_model()
    optimizer = distribute(sgd(model), model, TopK(density=0.05))
    train(model, optimizer, range(10))
    lockstep_reference(reference, TopK(density=0.05), 10, direction=direction)
    assert_close(model, reference)


def random_k_draws_the_same_everywhere() -> None:
    model, reference = make_model(), make_model()
    train(model, distribute(sgd(model, momentum=0.0), model, RandomK(density=0.1)), range(10))
    lockstep_reference(reference, RandomK(density=0.1), 10)
    assert_close(model, reference)


def a_chain_of_blocks_is_a_method() -> None:
    method = chain(momentum_correction(0.9), error_feedback(), via=allgather(top_k(0.05)))
    model, reference = make_model(), make_model()
    optimizer = distribute(sgd(model, momentum=0.0), model, method)
    train(model, optimizer, range(8))
    lockstep_reference(reference, method, 8)
    assert_close(model, reference)


def warmup_by_epoch_and_by_step() -> None:
    for unit in ("step", "epoch"):
        schedule = hvd.StagedWarmup(unit, stage_length=2, densities=(1.0, 0.25, 0.05))
        model = make_model()
        optimizer = distribute(sgd(model), model, DGC(density=schedule))
        name, p = "0.weight", model[0].weight
        sent = []
        for step in range(6):
            if unit == "epoch":
                optimizer.compression.set_epoch(step)
            train(model, optimizer, [step])
            sent.append(optimizer.compression.stats().layers[name].elements_sent)
        counts = [b - a for a, b in zip([0, *sent], sent, strict=False)]
        n = p.numel()
        assert counts == [n, n, n // 4, n // 4, n // 20, n // 20], counts
        assert_same_everywhere(model)


def learns() -> None:
    """Not only agreement: the loss falls under 1 % density, too."""
    model = make_model()
    optimizer = distribute(sgd(model), model, DGC(density=0.01))
    train(model, optimizer, range(150))
    dense = make_model()
    dense_reference(dense, sgd(dense), range(150))
    losses = []
    for m in (model, dense):
        with torch.no_grad():
            x = torch.randn(2000, 40, generator=torch.Generator().manual_seed(7))
            y = (x[:, :5] + 0.5 * x[:, 5:10]).argmax(1)
            z = m(x.to(DEVICE)).cpu()
            losses.append(torch.nn.functional.cross_entropy(z, y).item())
    assert losses[0] < 1.5 * losses[1] + 0.05 < 1.2, losses
    assert LR == 0.05


def momentum_of_a_chain_goes_for_weight_decay_too() -> None:
    method = chain(momentum_correction(0.9), error_feedback(), via=allgather(top_k(1.0)))
    unmasked = chain(
        momentum_correction(0.9, masking=False), error_feedback(), via=allgather(top_k(1.0))
    )
    assert method.momentum == 0.9
    model, reference = make_model(), make_model()
    optimizer = distribute(sgd(model, momentum=0.0, weight_decay=0.02), model, unmasked)
    train(model, optimizer, range(8))
    dense_reference(reference, sgd(reference, weight_decay=0.02), range(8))
    assert_close(model, reference)
