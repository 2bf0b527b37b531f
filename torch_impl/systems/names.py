"""The names of systems, over Horovod or MPI: ``hvd.LocalSGD(sync_every=8)`` and so on, for
``hvd.DistributedOptimizer(optimizer, method=...)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvd_compress.engines.base import Engine
from hvd_compress.systems import graphs, rounds
from hvd_compress.systems.teachers import CoordinatedSampler, Decay, Ramp, WeightDecay
from hvd_compress.systems.teachers.codistiller import codistillation_over

from .codistillation import TorchCodistiller


def systems_over(make_engine: Callable[[Any], Engine], module: str) -> dict[str, Any]:
    """Return what systems add to ``module``, by name, over the engines that ``make_engine`` makes
    of process sets."""
    return {
        **rounds.METHODS,
        **graphs.METHODS,
        "Codistillation": codistillation_over(TorchCodistiller, make_engine, module),
        "CoordinatedSampler": CoordinatedSampler,
        "Decay": Decay,
        "Ramp": Ramp,
        "WeightDecay": WeightDecay,
    }
