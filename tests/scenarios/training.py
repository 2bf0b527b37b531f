"""Agreement with plain SGD and with the lockstep world; what is Horovod's own passes through."""

from __future__ import annotations

from typing import Any

import horovod.torch
import torch

from hvd_compress.blocks import allgather, chain, error_feedback, momentum_correction, top_k
from hvd_compress.torch import DGC, ConfigError, NoCompression, Signum, TopK
from tests.scenarios import horovod_only
from tests.scenarios.common import (
    assert_close,
    assert_same_everywhere,
    begin,
    dense_reference,
    distribute,
    lockstep_reference,
    make_model,
    sgd,
    train,
    trains_as_plain,
)
from tests.scenarios.driver import hvd, raises

DENSE = DGC(density=1.0)  # momentum SGD, through all of DGC's machinery
SPARSE = DGC(density=0.05)


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
    """Horovod's own class serves its own compressors, and never ours; our options may stand beside
    them, if they say nothing."""

    def program(user, module, compression):
        model = make_model()
        optimizer = sgd(model)
        if user.distributes:
            optimizer = module.DistributedOptimizer(
                optimizer, model.named_parameters(), compression, seed=1, sparse_step=False
            )
            assert type(optimizer).__module__ == "horovod.torch.optimizer"
            assert not hasattr(optimizer, "compression")
            with raises(ConfigError, "distributed already"):
                module.DistributedOptimizer(optimizer, compression=SPARSE)
        user.train(model, optimizer, range(3))
        return model

    for module in (hvd, horovod.torch):
        for compression in (module.Compression.none, module.Compression.fp16):
            trains_as_plain(program, module, compression, rtol=1e-2, atol=1e-3)
        ours = module.DistributedOptimizer(sgd(make_model()), compression=SPARSE)
        assert not any("horovod" in cls.__module__ for cls in type(ours).__mro__)
        assert not vars(ours).keys() & {"_handles", "_allreduce_delay", "_grad_accs"}
    with raises(ConfigError, "sparse_step=True", "TopK"):
        begin(hvd.Compression.fp16, sparse_step=True)


class _Averaging(torch.optim.SGD):
    """A user's own: other arguments, an attribute that overrides the class's, and state."""

    window = 1

    def __init__(self, model: torch.nn.Module, window: int) -> None:
        super().__init__(model.parameters(), lr=0.05, momentum=0.9)
        self.window, self.losses = window, []

    def step(self, closure: Any = None) -> Any:
        self.losses.append(self.window)
        return super().step(closure)


def _groups(m: Any) -> torch.optim.SGD:
    return torch.optim.SGD(
        [
            {"params": m[0].parameters(), "lr": 0.01, "momentum": 0.5, "nesterov": True},
            {"params": m[2].parameters(), "weight_decay": 0.02},
            {"params": m[4].parameters(), "momentum": 0.0},
        ],
        lr=0.05,
        momentum=0.9,
    )


def _sgd(**options: Any) -> Any:
    return lambda model: sgd(model, **options)


def without_loss_it_is_the_plain_optimizer() -> None:
    """Momentum and weight decay act as without compression, inside the exchange and outside."""

    def program(user, make, method):
        model = make_model()
        inner = make(model)
        momenta = [group.get("momentum") for group in inner.param_groups]
        optimizer = user.distribute(inner, model, method)
        assert isinstance(optimizer, type(inner))
        assert type(optimizer).__name__ == type(inner).__name__
        user.train(model, optimizer, range(4))
        assert [group.get("momentum") for group in optimizer.param_groups] == momenta
        assert getattr(optimizer, "losses", [5] * 4) == [5] * 4
        return model

    decay = {"weight_decay": 0.01}
    by_gradient = DGC(density=1.0, weight_decay="gradient")
    for make, method in (
        *((_sgd(**options), NoCompression()) for options in ({"nesterov": True}, decay)),
        *((_sgd(nesterov=True, **decay), own) for own in (DENSE, by_gradient)),
        *((_sgd(maximize=True, **decay), own) for own in (DENSE, by_gradient)),
        (_sgd(foreach=False), DENSE),
        (_sgd(fused=True, momentum=0.0, **decay), DENSE),
        (_groups, DENSE),
        (lambda m: _Averaging(m, window=5), DENSE),
        (lambda m: torch.optim.Adam(m.parameters(), lr=0.01), NoCompression()),
    ):
        trains_as_plain(program, make, method)
    # Momentum of a chain goes for weight decay, too; names may be missing.
    chained = chain(
        momentum_correction(0.9, masking=False), error_feedback(), via=allgather(top_k(1.0))
    )
    model, reference = make_model(), make_model()
    optimizer = distribute(sgd(model, momentum=0.0, weight_decay=0.02), None, chained)
    train(model, optimizer, range(4))
    dense_reference(reference, sgd(reference, weight_decay=0.02), range(4))
    assert_close(model, reference)
    assert "allreduce.noname.0.0" in optimizer.compression.stats().layers


def gathered_averages_have_the_bits_of_the_lockstep_world() -> None:
    """One exchange: what the ranks add up, they add in rank order."""
    for method in (TopK(density=0.05, error_feedback=False), DGC(density=0.05)):
        (model, optimizer), other = begin(method, momentum=0.0), make_model()
        train(model, optimizer, range(1))
        lockstep_reference(other, method, 1, momentum=0.0)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            if p.dim() > 1 and p.numel() >= 1024:
                assert torch.equal(p, q)


def decay_follows_its_formula() -> None:
    """Separate, with a momentum of its own; beside votes it does not add up: w = w - lr (vote +
    wd w), as in the paper, since votes have the size of one step, whatever beta."""
    wd, m = 0.05, 0.9
    for method in (DGC(density=0.05), Signum()):
        for nesterov in (False, True):
            buffers: dict[str, torch.Tensor] = {}

            def direction(name, p, g, method=method, nesterov=nesterov, buffers=buffers):
                if isinstance(method, Signum):
                    return g + wd * p.detach()
                q = buffers[name] = m * buffers.get(name, torch.zeros_like(p)) + wd * p.detach()
                return g + (wd * p.detach() + m * q if nesterov else q)

            model, optimizer = begin(method, weight_decay=wd, nesterov=nesterov)
            reference = make_model()
            train(model, optimizer, range(5))
            lockstep_reference(reference, method, 5, nesterov=nesterov, direction=direction)
            assert_close(model, reference)
            assert_same_everywhere(model)
