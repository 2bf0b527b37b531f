"""A model of PyTorch whose parameters servers own, on other ranks of the job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch

from hvd_compress.errors import ConfigError
from hvd_compress.systems.servers import ServerStats

from ..parameters import Parameter, check_model, names_of_parameters
from ..systems.optimizer import is_distributed

T = TypeVar("T")
S = TypeVar("S", bound="ServedModel")


class ServedModel:
    """A model whose parameters are moved to the arrays of ``server``, which subclasses make, and
    back.

    Attributes:
        server: an object of :mod:`hvd_compress.mpi`, on arrays.
        is_server: whether this rank serves.
        rank, size: the number of this worker, and of all workers; shares of the data go by these.
    """

    server: Any

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}"
            )
        if is_distributed(optimizer):
            raise ConfigError(
                "this optimizer is distributed already, and workers meet at the servers: pass the "
                "one that it was made from, for instance torch.optim.SGD(...); for local steps on "
                "a server use hvd.AsynchronousEASGD(model, optimizer)"
            )
        check_model(model)
        self._optimizer = optimizer
        self._names: Mapping[Parameter, str] = names_of_parameters(
            optimizer.param_groups, model.named_parameters()
        )
        self._parameters = {
            self._names[p]: p
            for group in optimizer.param_groups
            for p in group["params"]
            if p.requires_grad
        }
        if not self._parameters:
            raise ConfigError(
                "no parameter of the optimizer is trained: set requires_grad before the workers "
                "are made, since servers own what is trained then"
            )

    def _arrays(self) -> dict[str, np.ndarray]:
        return {name: as_array(p) for name, p in self._parameters.items()}

    @property
    def is_server(self) -> bool:
        return self.server.is_server

    @property
    def rank(self) -> int:
        return self.server.rank

    @property
    def size(self) -> int:
        return self.server.size

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the loader's batches on workers, as long as there are servers; none on servers."""
        return self.server.batches(loader)

    def stats(self) -> list[ServerStats]:
        """Return what each server has counted, on every rank, behind the ``with`` statement."""
        return self.server.stats()

    @torch.no_grad()
    def _load(self) -> None:
        for name, p in self._parameters.items():
            p.copy_(torch.from_numpy(self.server.parameters[name]))

    def __enter__(self: S) -> S:
        self.server.__enter__()
        if self.is_server:
            self._load()
        return self

    def __exit__(self, *error: Any) -> None:
        self.server.__exit__(*error)
        self._load()


def as_array(x: torch.Tensor) -> np.ndarray:
    """Return an array for the servers, of float64 or else float32."""
    wide = x.detach().to("cpu", x.dtype if x.dtype == torch.float64 else torch.float32)
    return wide.numpy()
