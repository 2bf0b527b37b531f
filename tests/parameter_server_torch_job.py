"""``mpirun -np 3 python parameter_server_torch_job.py``: parameter servers for models of torch.

The reference is the user's own optimizer on the mean gradient in one process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import hvd_compress.torch.mpi as hvd
from hvd_compress.errors import ConfigError, UnsupportedError

hvd.init()
torch.set_num_threads(1)


def network(dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(9, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)]
    return torch.nn.Sequential(*layers).to(dtype)


def batch(worker: int, step: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng([worker, step]).standard_normal((6, 9))).float()


def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x.to(next(model.parameters()).dtype)).float().square().mean()


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


Make = Callable[[Any], torch.optim.Optimizer]


def sgd(p: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)


def adamw(p: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(p, 1e-2)


def adagrad(p: Any) -> torch.optim.Optimizer:
    p = list(p)
    return torch.optim.Adagrad([{"params": p[:2]}, {"params": p[2:], "lr": 0.3}], 0.1)


def trained(make: Make, steps: int, before: int = 0, decay: float = 1.0, **more: Any) -> None:
    """As one process on all workers' batches."""
    model, reference = network(), network()
    optimizer, its = make(model.parameters()), make(reference.parameters())
    for mine, own in ((model, optimizer), (reference, its)):
        for step in range(before):  # an optimizer that has a state already
            own.zero_grad()
            loss(mine, batch(9, step)).backward()
            own.step()
    rates, its_rates = (torch.optim.lr_scheduler.ExponentialLR(o, decay) for o in (optimizer, its))
    with hvd.parameter_server(model, optimizer, **more) as worker:
        for step in worker.batches(range(steps)):
            optimizer.zero_grad()
            loss(model, batch(worker.rank, step)).backward()
            worker.step()
            rates.step()
    for step in range(steps):
        its.zero_grad()
        both = torch.cat([batch(rank, step) for rank in range(worker.size)])
        loss(reference, both).backward()
        its.step()
        its_rates.step()
    torch.testing.assert_close(flat(model), flat(reference), rtol=1e-4, atol=1e-6)
    assert worker.stats().updates == steps
    everyone = hvd.allgather(flat(model)[None])
    assert all(torch.equal(each, everyone[0]) for each in everyone)


def half_precision_keeps_its_parameters_on_the_server() -> None:
    """Steps that are too small for bfloat16 add up."""
    model = network(torch.bfloat16)
    before = flat(model)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with hvd.parameter_server(model, optimizer) as worker:
        for _ in worker.batches(range(40)):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            worker.step()
    assert next(model.parameters()).dtype == torch.bfloat16
    torch.testing.assert_close(flat(model), before - 0.04, atol=4e-3, rtol=0)


def a_layer_that_is_not_used_stays() -> None:
    """Momentum and weight decay move only what has a gradient, as without servers."""
    for make in (sgd, adamw):
        model, reference = network(), network()
        optimizer, its = make(model.parameters()), make(reference.parameters())
        with hvd.parameter_server(model, optimizer) as worker:
            for step in worker.batches(range(4)):
                optimizer.zero_grad()
                used = model if step == 1 else model[:1]
                loss(used, batch(worker.rank, step)).backward()
                worker.step()
        for step in range(4):
            its.zero_grad()
            used = reference if step == 1 else reference[:1]
            loss(used, torch.cat([batch(r, step) for r in range(worker.size)])).backward()
            its.step()
        torch.testing.assert_close(flat(model), flat(reference), rtol=1e-4, atol=1e-6)


def what_cannot_be() -> None:
    model = network()
    plain = torch.optim.SGD(model.parameters(), 0.1)
    for distributed in (
        hvd.DistributedOptimizer(plain, method=hvd.DiLoCo()),
        hvd.DistributedOptimizer(plain),
    ):
        for make in (hvd.parameter_server, hvd.AsynchronousLeaderSGD):
            with pytest.raises(ConfigError, match=r"torch\.optim\.SGD\(\.\.\.\)"):
                make(model, distributed)
    frozen = network().requires_grad_(False)
    lbfgs, of_frozen = torch.optim.LBFGS(model.parameters()), sgd(frozen.parameters())
    for words, its, optimizer, options in (
        (r"must be a torch\.optim\.Optimizer, not DiLoCo", model, hvd.DiLoCo(), {}),
        ("no parameter of the optimizer is trained", frozen, of_frozen, {}),
        ("backup=7 of 2 workers", model, plain, {"backup": 7}),
        ("worker_timeout=0", model, plain, {"worker_timeout": 0}),
        ("LBFGS", model, lbfgs, {}),
        ("needs the optimizer's momentum", model, plain, {"compression": "dgc"}),
    ):
        with pytest.raises((ConfigError, UnsupportedError), match=words):
            hvd.parameter_server(its, optimizer, **options)
    worker = hvd.parameter_server(model, plain)
    with pytest.raises(ConfigError, match="from the end"):
        worker.stats()
    with worker:
        pass
    assert worker.stats().pushes == 0
    with pytest.raises(ConfigError, match=r"worker\.batches"):
        worker.step()


def asynchronous_methods_train() -> None:
    """From 16 parameters of a linear model to the solution, with a rank 0 that only serves."""
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    y = x @ torch.ones(16, 1)
    groups = functools.partial(hvd.AsynchronousLeaderSGD, global_every=8, groups=1)
    for make in (hvd.AsynchronousLeaderSGD, groups):
        torch.manual_seed(hvd.rank())  # all begin with rank 0's
        model = torch.nn.Linear(16, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        with make(model, optimizer) as worker:
            for step in worker.batches(range(150)):
                rows = np.random.default_rng([worker.rank, step]).integers(64, size=16)
                optimizer.zero_grad()
                value = (model(x[rows]) - y[rows]).square().mean()
                value.backward()
                worker.step(value)
        torch.testing.assert_close(model.weight.detach(), torch.ones(1, 16), atol=0.05, rtol=0)
        everyone = hvd.allgather(flat(model)[None])
        assert all(torch.equal(each, everyone[0]) for each in everyone)


trained(sgd, 5)
trained(sgd, 5, before=3, decay=0.8)
trained(adamw, 4)
trained(adagrad, 4, before=2)
half_precision_keeps_its_parameters_on_the_server()
a_layer_that_is_not_used_stays()
asynchronous_methods_train()
what_cannot_be()
print("all is well")
