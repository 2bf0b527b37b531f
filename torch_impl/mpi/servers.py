"""Models of PyTorch that meet at a server over MPI, on rank 0: a parameter server, and asynchronous
Leader SGD."""

from __future__ import annotations

import collections
import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.mpi.process_sets import global_process_set
from hvd_compress.systems.base import Arrays
from hvd_compress.systems.servers import mpi as servers

from ..optimizers.local_steps import is_distributed
from ..parameters import Parameter, check_model, names_of_parameters


class ServedModel(servers.Serving):
    """A model whose parameters are moved to ``parameters``, the arrays, and back."""

    def _take(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Arrays:
        """Take a model with its optimizer, and return the arrays of what is trained."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}"
            )
        if is_distributed(optimizer):
            raise ConfigError(
                "this optimizer is distributed already, and workers meet at the server: pass the "
                "one that it was made from, for instance torch.optim.SGD(...); for local steps "
                "with a server use hvd.AsynchronousLeaderSGD(model, optimizer)"
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
                "are made, since the server owns what is trained then"
            )
        return self._arrays()

    def _arrays(self) -> Arrays:
        return {name: as_array(p) for name, p in self._parameters.items()}

    @torch.no_grad()
    def _load(self) -> None:
        for name, p in self._parameters.items():
            p.copy_(torch.from_numpy(self.parameters[name]))

    def _finish(self) -> None:
        super()._finish()
        self._load()


def as_array(x: torch.Tensor) -> np.ndarray:
    """Return an array for the server, of float64 or else float32."""
    wide = x.detach().to("cpu", x.dtype if x.dtype == torch.float64 else torch.float32)
    return wide.numpy()


def parameter_server(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    worker_timeout: float = 60.0,
    seed: int = 0,
    **rules: Any,
) -> Worker:
    """Return a worker of a parameter server; a collective, after ``hvd.init()``::

        with hvd.parameter_server(model, optimizer, mode="async") as worker:
            for x, y in worker.batches(loader):
                optimizer.zero_grad()
                loss(model(x), y).backward()
                worker.step()

    Rank 0 serves and gets no batches.  The user's optimizer steps there, with the learning rates
    that it has on the worker.  Buffers of the model, such as running statistics, stay on their
    rank.

    Args:
        model: its trained parameters are those of the optimizer; all ranks get those of rank 0.
        optimizer: of any class that needs no closure.
        worker_timeout, seed: see :class:`hvd_compress.mpi.ParameterServer`.
        rules: options of :class:`hvd_compress.systems.servers.Rules`: ``mode``, ``backup``,
            ``compression``.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError("LBFGS needs a closure, which a server cannot call: use SGD or Adam")
    return Worker(model, optimizer, worker_timeout, seed, rules)


class Worker(ServedModel, servers.ParameterServer):
    """This rank's part; see :func:`parameter_server`.

    Attributes:
        is_server: whether this rank serves.
        rank, size: the number of this worker, and of all workers; shares of the data go by these.
        taken: whether the server has used the last gradient.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        worker_timeout: float,
        seed: int,
        rules: dict[str, Any],
    ) -> None:
        arrays = self._take(model, optimizer)
        super().__init__(
            arrays,
            _OnServer(optimizer, self._names),
            worker_timeout=worker_timeout,
            seed=seed,
            comm=global_process_set.communicator,
            **rules,
        )
        self._load()

    def step(self) -> None:  # type: ignore[override]  # the model has gradients
        """Send the gradients of the model's parameters, wait until this worker may go on, and give
        the model the new parameters.  A parameter that has no gradient on any worker stays as it
        is."""
        gradients: dict[str, np.ndarray | None] = {}
        for name, p in self._parameters.items():
            if p.grad is not None and p.grad.is_sparse:
                raise UnsupportedError(f"the gradient of {name!r} is sparse: use sparse=False")
            gradients[name] = None if p.grad is None else as_array(p.grad)
        super().step(gradients, [float(group["lr"]) for group in self._optimizer.param_groups])
        self._load()


class _OnServer:
    """The user's optimizer, over the arrays that the server owns: a copy, whose parameters share
    memory with them.  It begins with the state that the optimizer has already."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[Parameter, str]) -> None:
        self._theirs, self._names = optimizer, names
        self._copy: torch.optim.Optimizer | None = None
        self._parameters: dict[str, Parameter] = {}

    def step(self, parameters: Arrays, gradients: Arrays, rates: Sequence[float]) -> None:
        if self._copy is None:
            self._copy = self._made(parameters)
        for name, p in self._parameters.items():
            g = gradients.get(name)
            p.grad = None if g is None else torch.from_numpy(np.ascontiguousarray(g))
        for i, group in enumerate(self._copy.param_groups):
            group["lr"] = rates[i] if rates else self._theirs.param_groups[i]["lr"]
        self._copy.step()

    def _made(self, parameters: Arrays) -> torch.optim.Optimizer:
        self._parameters = {
            name: torch.nn.Parameter(torch.from_numpy(x)) for name, x in parameters.items()
        }
        trained = {p: self._parameters[n] for p, n in self._names.items() if n in parameters}
        made = copy.copy(self._theirs)
        made.state = collections.defaultdict(dict)
        made.param_groups = [
            {**group, "params": [trained[p] for p in group["params"] if p in trained]}
            for group in self._theirs.param_groups
        ]
        for p, own in trained.items():
            for key, x in self._theirs.state.get(p, {}).items():
                if isinstance(x, torch.Tensor):
                    is_like = x.shape == p.shape and p.dim()
                    made.state[own][key] = x.detach().clone().to(own.dtype if is_like else x.dtype)
                else:
                    made.state[own][key] = copy.deepcopy(x)
        return made


class AsynchronousLeaderSGD(ServedModel, servers.AsynchronousLeaderSGD):
    """Leader SGD whose workers take steps at their own speed; a collective, after ``hvd.init()``::

        with hvd.AsynchronousLeaderSGD(model, optimizer, local_every=4) as worker:
            for x, y in worker.batches(loader):
                value = loss(model(x), y)
                value.backward()
                worker.step(value)

    Rank 0 counts the steps of all and names the leaders; it gets no batches.  After the statement
    all ranks have the mean of the workers' models.  Buffers of the model stay on their rank.

    Args:
        model: its trained parameters are those of the optimizer; all ranks begin with rank 0's.
        optimizer: takes the local steps.
        options: of :class:`hvd_compress.systems.rounds.LeaderSGD`; periods are steps per worker.
        worker_timeout: seconds after which the others go on without a silent worker.

    >>> model = torch.nn.Linear(2, 1)
    >>> hvd.AsynchronousLeaderSGD(model, torch.optim.SGD(model.parameters(), lr=0.1))
    Traceback (most recent call last):
    hvd_compress.errors.ConfigError: AsynchronousLeaderSGD on 1 rank: there must be a server and ...
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: Any
    ) -> None:
        comm = global_process_set.communicator
        super().__init__(self._take(model, optimizer), comm=comm, **options)
        self._load()

    def step(self, loss: Any) -> None:  # type: ignore[override]  # the model has parameters
        """Let the optimizer step on this worker's gradients, and tell the server.

        Args:
            loss: of the batch, a number or a tensor of one element.
        """
        self._optimizer.step()
        super().step(self._arrays(), float(torch.as_tensor(loss).detach()))
        self._load()
        if self.recovered:  # momentum would lead to NaN again
            self._optimizer.state.clear()
