"""Calls that ``torch.compile`` leaves as they are.

Exchanges wait for other ranks and work on arrays that PyTorch does not know, so nothing of them can
become a graph.  Public calls of optimizers, hooks that PyTorch calls, and collectives therefore
break the graph of a training step that is compiled as a whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def run_eagerly(cls: type[Any], *methods: str) -> None:
    """Keep ``torch.compile`` out of methods of a class.

    It imports the compiler, which takes seconds, so it comes when optimizers are made, which import
    it themselves.
    """
    for name in methods:
        method = getattr(cls, name)
        if not hasattr(method, "_torchdynamo_disable"):  # of a base, or of an optimizer before
            setattr(cls, name, torch.compiler.disable(method))


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that ``torch.compile`` leaves as it is; it asks for the compiler only where
    that is at work."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call
