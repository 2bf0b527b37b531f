"""A parameter server for a model of PyTorch, over MPI."""

from __future__ import annotations

import collections
import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hvd_compress import mpi
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.mpi.process_sets import global_process_set
from hvd_compress.systems.servers.rules import Rules

from ..parameters import Parameter
from .served_model import ServedModel, as_array


def parameter_server(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    servers: int = 1,
    mode: str = "sync",
    backup: int = 0,
    staleness: int | None = None,
    correction: str = "none",
    lam: float | None = None,
    compression: Any = "none",
    compression_down: Any = "none",
    worker_timeout: float = 60.0,
    seed: int = 0,
) -> Worker:
    """Return a worker of a parameter server; a collective, after ``hvd.init()``::

        with hvd.parameter_server(model, optimizer, mode="async") as worker:
            for x, y in worker.batches(loader):
                optimizer.zero_grad()
                loss(model(x), y).backward()
                worker.step()

    The first ``servers`` ranks serve and get no batches.  The user's optimizer steps there, on the
    servers' pieces, with the learning rates that it has on the worker.  Buffers of the model, such
    as running statistics, stay on their rank.

    Args:
        model: its trained parameters are those of the optimizer; all ranks get those of rank 0.
        optimizer: of any class that needs no closure; with several servers, one that works element
            by element.
        servers, worker_timeout, seed: see :class:`hvd_compress.mpi.ParameterServer`.
        mode, backup, staleness, correction, lam, compression, compression_down: see
            :class:`hvd_compress.systems.servers.Rules`.

    Raises:
        ConfigError: an option has a value that cannot be honoured.
        MismatchError: the ranks differ in options or parameters.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError("LBFGS needs a closure, which a server cannot call: use SGD or Adam")
    rules = {
        "mode": mode,
        "backup": backup,
        "staleness": staleness,
        "correction": correction,
        "lam": lam,
        "compression": compression,
        "compression_down": compression_down,
    }
    return Worker(model, optimizer, servers, worker_timeout, seed, rules)


class Worker(ServedModel):
    """This rank's part; see :func:`parameter_server`.

    Attributes:
        taken: whether the servers have used the last gradient.
    """

    server: mpi.ParameterServer

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        servers: int,
        worker_timeout: float,
        seed: int,
        rules: dict[str, Any],
    ) -> None:
        super().__init__(model, optimizer)
        method = Rules(**rules).compression
        momentum: Any = 0.0
        nesterov: Any = False
        if method.takes_momentum:
            found = {(g.get("momentum"), g.get("nesterov")) for g in optimizer.param_groups}
            if len(found) > 1 or not isinstance(optimizer, torch.optim.SGD):
                raise ConfigError(
                    f"compression={method.name!r} corrects the momentum of torch.optim.SGD, the "
                    "same for all parameters; use for instance compression='topk:density=0.01'"
                )
            momentum, nesterov = found.pop()
        self.server = mpi.ParameterServer(
            self._arrays(),
            _OnServer(optimizer, self._names, bool(method.takes_momentum)),
            servers=servers,
            worker_timeout=worker_timeout,
            seed=seed,
            momentum=momentum if method.momentum is None else method.momentum,
            nesterov=nesterov if method.nesterov is None else method.nesterov,
            comm=global_process_set.communicator,
            **rules,
        )
        self._load()

    @property
    def taken(self) -> bool:
        return self.server.taken

    def step(self) -> None:
        """Send the gradients of the model's parameters, wait until this worker may go on, and give
        the model the new parameters.  A parameter that has no gradient on any worker stays as it
        is."""
        gradients: dict[str, np.ndarray | None] = {}
        for name, p in self._parameters.items():
            if p.grad is not None and p.grad.is_sparse:
                raise UnsupportedError(f"the gradient of {name!r} is sparse: use sparse=False")
            gradients[name] = None if p.grad is None else as_array(p.grad)
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        self.server.step(gradients, rates)
        self._load()

    def set_epoch(self, epoch: float) -> None:
        """Announce the epoch, for compressions with schedules by epoch."""
        self.server.set_epoch(epoch)


class _OnServer:
    """The user's optimizer, over the pieces that a server owns.

    It is a copy, whose parameters share memory with the server's arrays; state that the optimizer
    has already is cut as the parameters are.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: Mapping[Parameter, str], frozen: bool
    ) -> None:
        self._theirs, self._names, self._without_momentum = optimizer, names, frozen
        self._copy: torch.optim.Optimizer | None = None
        self._pieces: dict[str, Parameter] = {}

    def step(
        self,
        parameters: Mapping[str, np.ndarray],
        gradients: Mapping[str, np.ndarray],
        rates: Sequence[float],
        scale: float = 1.0,
    ) -> None:
        if self._copy is None:
            self._copy = self._made(parameters)
        for name, p in self._pieces.items():
            g = gradients.get(name)
            p.grad = None if g is None else torch.from_numpy(np.ascontiguousarray(g))
        for i, group in enumerate(self._copy.param_groups):
            group["lr"] = scale * (rates[i] if rates else self._theirs.param_groups[i]["lr"])
        self._copy.step()

    def _made(self, parameters: Mapping[str, np.ndarray]) -> torch.optim.Optimizer:
        made = copy.copy(self._theirs)
        made.state, made.param_groups = collections.defaultdict(dict), []
        for group in self._theirs.param_groups:
            own = []
            for p in group["params"]:
                for name in self._pieces_of(p, parameters):
                    piece = torch.nn.Parameter(torch.from_numpy(parameters[name]))
                    self._pieces[name] = piece
                    own.append(piece)
                    if p in self._theirs.state:
                        made.state[piece] = _cut(self._theirs.state[p], p, name, piece)
            changed = {**group, "params": own}
            if self._without_momentum:
                changed |= {"momentum": 0.0, "nesterov": False}
            made.param_groups.append(changed)
        return made

    def _pieces_of(self, p: Parameter, parameters: Mapping[str, np.ndarray]) -> list[str]:
        whole = self._names[p]
        return [n for n in parameters if n == whole or n.startswith(f"{whole}[")]


def _cut(state: Mapping[str, Any], p: Parameter, name: str, piece: Parameter) -> dict[str, Any]:
    """Return the part of a parameter's state that belongs to a piece."""
    rows = slice(None)
    if name.endswith("]") and p.dim() and len(piece) < len(p):
        rows = slice(*map(int, name.rpartition("[")[2][:-1].split(":")))
    return {
        key: x[rows].detach().clone().to(piece.dtype)
        if isinstance(x, torch.Tensor) and x.shape == p.shape and p.dim()
        else copy.deepcopy(x)
        for key, x in state.items()
    }
