"""``DistributedOptimizer(..., method=...)``: local steps, and a training method around them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hvd_compress.engines.base import Engine
from hvd_compress.engines.local import LocalEngine
from hvd_compress.systems import TrainingMethod
from hvd_compress.systems.rounds.factories import check_left_out

from ..parameters import Parameter
from .optimizer import LocalStepsOptimizer, train_locally


def distribute_by_method(
    make_engine: Callable[[Any, float], Engine],
    signature: inspect.Signature,
    *,
    optimizer: torch.optim.Optimizer,
    method: TrainingMethod | type[TrainingMethod],
    named_parameters: Iterable[tuple[str, Parameter]] | None,
    process_set: Any,
    seed: int,
    **of_gradients: Any,
) -> LocalStepsOptimizer:
    """Return what ``local_steps(optimizer, method)`` does.

    Args:
        make_engine: of a process set and a predivide factor.
        signature: that of ``DistributedOptimizer``, with the defaults.
        of_gradients: the options of ``DistributedOptimizer`` that are about gradients, which do not
            travel here.

    Raises:
        ConfigError: an option has a value that cannot be honoured; one of the last is not left out.
    """
    check_left_out(of_gradients, signature, method)
    engine = make_engine(process_set, 1.0) if process_set.included() else LocalEngine()
    return train_locally(optimizer, method, engine, named_parameters=named_parameters, seed=seed)
