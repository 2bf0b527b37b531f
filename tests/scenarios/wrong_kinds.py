"""Values of wrong kinds, handed to every public call: each ends in an error of the package, in one
of Python's own about the call, or in PyTorch's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

import hvd_compress
from tests.scenarios.doors import WRONG, problems, quietly
from tests.scenarios.driver import hvd

#: end the job, wait for other ranks, or belong to Horovod, which takes what it likes
LEFT_OUT = {"barrier", "init", "shutdown", "Compression", "ProcessSet"}
#: calls of one part of the package to another, which users find among the attributes
INNER = {
    *("begin", "bind", "exchange_gradients", "take", "velocity_factor", "load_users_state_dict"),
    *("after_step", "average", "before_step", "consensus", "freeze", "restart", "update"),
    *("compression_options", "expect_scale", "confirm_scale", "formula_of"),
    *("take_scale", "repaired"),
}


def _sgd() -> torch.optim.SGD:
    return torch.optim.SGD(torch.nn.Linear(3, 2).parameters(), lr=0.1)


#: a value for each argument that has to be given
RIGHT: dict[str, Callable[[], Any]] = {
    "optimizer": _sgd,
    "model": lambda: torch.nn.Linear(3, 2),
    "parameters": lambda: torch.nn.Linear(3, 2).state_dict(),
    "params": lambda: [torch.nn.Parameter(torch.ones(2))],
    "tensor": lambda: torch.ones(3),
    "root_rank": lambda: 0,
    "compression": lambda: "topk",
    "method": lambda: hvd.LocalSGD(sync_every=2),
    "handle": lambda: hvd.allreduce_async(torch.ones(2), name="handle"),
    "state": lambda: hvd.DDPState("topk"),
    "obj": lambda: 1,
    "batch_size": lambda: 8,
    "reference_batch_size": lambda: 4,
    "steps": lambda: 3,
    "config": lambda: {"method": "topk"},
    "name": lambda: "x",
}


def _problems_of(label: str, function_of: Callable[[], Callable[..., Any]]) -> list[str]:
    return problems(label, function_of, RIGHT, (*WRONG, torch.ones(2)))


def what_functions_and_classes_are_given() -> None:
    def collect() -> list[str]:
        found = []
        for module in (hvd, hvd_compress):
            for name in sorted(set(module.__all__) - LEFT_OUT):
                door = getattr(module, name)
                is_error = inspect.isclass(door) and issubclass(door, BaseException)
                if callable(door) and not is_error and not inspect.isabstract(door):
                    found += _problems_of(name, lambda d=door: d)
        return found

    quietly(collect)


def what_methods_are_given() -> None:
    things = {
        "optimizer": lambda: hvd.DistributedOptimizer(_sgd(), compression="topk:density=0.5"),
        "LocalSGD": lambda: hvd.DistributedOptimizer(_sgd(), method=hvd.LocalSGD(sync_every=2)),
        "DDPState": lambda: hvd.DDPState("topk"),
        "SAM": lambda: hvd.SAM(torch.nn.Linear(3, 2)),
        "TopK": lambda: hvd.TopK(),
        **{
            name: lambda n=name: getattr(hvd, n)(torch.nn.Linear(3, 2).parameters(), lr=0.1)
            for name in ("LAMB", "LARS", "OneBitAdam", "ZeroOneAdam")
        },
    }

    def methods_of(label: str, make: Callable[[], Any]) -> list[str]:
        found, example = [], make()
        for name in dir(example):
            home = getattr(getattr(type(example), name, None), "__module__", None) or ""
            is_door = home.startswith("hvd_compress") and not name.startswith("_")
            if is_door and name not in INNER and inspect.ismethod(getattr(example, name)):
                kept: list[Any] = []

                def method(n: str = name, kept: list[Any] = kept) -> Callable[..., Any]:
                    kept[:] = [make()]
                    return getattr(kept[0], n)

                found += _problems_of(f"{label}.{name}", method)
        return found

    def collect() -> list[str]:
        found = [problem for label, make in things.items() for problem in methods_of(label, make)]
        distributed, local = things["optimizer"](), things["LocalSGD"]()
        found += methods_of("optimizer.compression", lambda: distributed.compression)
        return found + methods_of("optimizer.training", lambda: local.training)

    quietly(collect)
