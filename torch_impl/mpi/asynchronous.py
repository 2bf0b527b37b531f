"""Asynchronous Leader SGD and elastic averaging for models of PyTorch, over MPI."""

from __future__ import annotations

from typing import Any

import torch

from hvd_compress import mpi
from hvd_compress.mpi.process_sets import global_process_set

from .served_model import ServedModel


class _Asynchronous(ServedModel):
    def __init__(
        self, cls: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: Any
    ) -> None:
        super().__init__(model, optimizer)
        self.server = cls(self._arrays(), comm=global_process_set.communicator, **options)
        self._load()

    def step(self, loss: Any) -> None:
        """Let the optimizer step on this worker's gradients, and tell the server.

        Args:
            loss: of the batch, a number or a tensor of one element.
        """
        self._optimizer.step()
        self.server.step(self._arrays(), float(torch.as_tensor(loss).detach()))
        self._load()
        if self.server.recovered:  # momentum would lead to NaN again
            self._optimizer.state.clear()


class AsynchronousLeaderSGD(_Asynchronous):
    """Leader SGD whose workers take steps at their own speed; a collective, after ``hvd.init()``::

        with hvd.AsynchronousLeaderSGD(model, optimizer, local_every=4) as worker:
            for x, y in worker.batches(loader):
                optimizer.zero_grad()
                value = loss(model(x), y)
                value.backward()
                worker.step(value)

    Rank 0 counts the steps of all and names the leaders; it gets no batches.  Behind the statement
    all ranks have the mean of the workers' models.  Buffers of the model stay on their rank.

    Args:
        model: its trained parameters are those of the optimizer; all ranks begin with rank 0's.
        optimizer: takes the local steps.
        global_every, local_every: steps per worker, on average, between choices of the leader of
            all workers and of those of groups; the first is a multiple of the second.
        global_pull, local_pull: how far workers are pulled to a leader that is new.
        global_drift, local_drift: how far over the next ``global_every``, ``local_every`` steps.
        groups: lists of workers, which count from 0, or the number of workers that make a group, in
            their order; ``None`` for the workers of each node.
        average_over: the number of minibatches whose mean loss is compared; ``None`` for
            ``local_every``.
        worker_timeout: seconds after which the others go on without a silent worker.

    Raises:
        ConfigError: an option has a value that cannot be honoured.
        MismatchError: the ranks differ in options or parameters.

    A rank alone has nobody to serve:

    >>> model = torch.nn.Linear(2, 1)
    >>> hvd.AsynchronousLeaderSGD(model, torch.optim.SGD(model.parameters(), lr=0.1))
    Traceback (most recent call last):
        ...
    hvd_compress.errors.ConfigError: servers=1 of 1 ranks: there must be a server and a worker, ...
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        global_every: int = 16,
        local_every: int = 4,
        global_pull: float = 0.1,
        local_pull: float = 0.1,
        global_drift: float = 0.1,
        local_drift: float = 0.1,
        groups: Any = None,
        average_over: int | None = None,
        worker_timeout: float = 60.0,
    ) -> None:
        super().__init__(
            mpi.AsynchronousLeaderSGD,
            model,
            optimizer,
            global_every=global_every,
            local_every=local_every,
            global_pull=global_pull,
            local_pull=local_pull,
            global_drift=global_drift,
            local_drift=local_drift,
            groups=groups,
            average_over=average_over,
            worker_timeout=worker_timeout,
        )


class AsynchronousEASGD(_Asynchronous):
    """Elastic averaging whose workers meet the centre at their own speed; a collective.  It is used
    as :class:`AsynchronousLeaderSGD`; behind the statement all ranks have the centre.

    With ``torch.optim.SGD(..., nesterov=True)`` it is asynchronous EAMSGD, but that the force acts
    at the parameters after the local step.

    Args:
        model, optimizer, worker_timeout: see :class:`AsynchronousLeaderSGD`.
        sync_every: a worker's local steps between meetings.
        alpha: how far the worker and the centre move to each other, a share of their distance.
        servers: how many ranks share the centre.

    Raises: what :class:`AsynchronousLeaderSGD` does.

    A rank alone has nobody to serve:

    >>> model = torch.nn.Linear(2, 1)
    >>> hvd.AsynchronousEASGD(model, torch.optim.SGD(model.parameters(), lr=0.1))
    Traceback (most recent call last):
        ...
    hvd_compress.errors.ConfigError: servers=1 of 1 ranks: there must be a server and a worker, ...
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        sync_every: int = 10,
        alpha: float = 0.1,
        servers: int = 1,
        worker_timeout: float = 60.0,
    ) -> None:
        super().__init__(
            mpi.AsynchronousEASGD,
            model,
            optimizer,
            sync_every=sync_every,
            alpha=alpha,
            servers=servers,
            worker_timeout=worker_timeout,
        )

    def step(self, loss: Any = None) -> None:
        """Let the optimizer step on this worker's gradients, and meet the centre if that is due.

        Args:
            loss: not needed, since elastic averaging has no leader.
        """
        super().step(0.0 if loss is None else loss)
