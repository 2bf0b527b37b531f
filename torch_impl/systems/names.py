"""The names of systems: ``hvd.LocalSGD(optimizer, sync_every=8)`` and so on, over Horovod or
MPI."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from hvd_compress.config import check_process_set
from hvd_compress.engines.base import Engine
from hvd_compress.systems import TrainingMethod, graphs
from hvd_compress.systems.rounds.factories import factories_of
from hvd_compress.systems.teachers import CoordinatedSampler, Decay, Ramp, WeightDecay
from hvd_compress.systems.teachers.codistiller import codistillation_over

from ..parameters import Parameter
from ..replicas import is_group
from .codistillation import TorchCodistiller
from .optimizer import LocalStepsOptimizer, train_locally

_MORE = """

    The optimizer of this name takes ``optimizer`` first, of any class, and returns one of a class
    made from it, with ``training`` as its attribute; a collective.  Without ``optimizer`` it is the
    method itself, for ``hvd.DistributedOptimizer(optimizer, method=...)``.  More arguments:

        named_parameters: ``model.named_parameters()``; names appear in statistics.
        process_set: the ranks that take part; ``None`` for all.  ``hvd_compress.torch`` takes a
            mesh or a process group of ``torch.distributed`` as well, without Horovod: for a model
            that ``fully_shard`` has sharded, ``mesh["replica"]``.
        seed: for randomness that the ranks share.
"""


def systems_over(make_engine: Callable[[Any], Engine], module: str) -> dict[str, Any]:
    """Return what systems add to ``module``, by name, over the engines that ``make_engine`` makes
    of process sets."""

    def local_steps(
        optimizer: torch.optim.Optimizer,
        method: TrainingMethod | type[TrainingMethod],
        *,
        named_parameters: Iterable[tuple[str, Parameter]] | None = None,
        process_set: Any = None,
        seed: int = 0,
    ) -> LocalStepsOptimizer:
        """Return an optimizer that trains by a method of ``hvd_compress.systems.rounds``, such as
        ``LocalSGD(sync_every=8)``, of ``hvd_compress.systems.graphs``, such as
        ``ExactDiffusion("cycle")``, or one of your own.  A collective.

        Args:
            optimizer: takes the local steps; of any class.
            method: the training method.
            named_parameters: ``model.named_parameters()``; names appear in statistics.
            process_set: the ranks that take part; ``None`` for all.
            seed: for randomness that the ranks share.

        Raises:
            ConfigError: an option has a value that cannot be honoured.
            MismatchError: the ranks differ in method or options.
        """
        if process_set is not None and not is_group(process_set):
            check_process_set(process_set)
        engine = make_engine(process_set)
        return train_locally(
            optimizer, method, engine, named_parameters=named_parameters, seed=seed
        )

    own = {"named_parameters": None, "process_set": None, "seed": 0}
    return {
        **factories_of(local_steps, module, own, _MORE),
        **graphs.METHODS,
        "Codistillation": codistillation_over(TorchCodistiller, make_engine, module),
        "CoordinatedSampler": CoordinatedSampler,
        "Decay": Decay,
        "Ramp": Ramp,
        "WeightDecay": WeightDecay,
    }
