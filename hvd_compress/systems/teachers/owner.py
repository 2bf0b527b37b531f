"""The owner of codistillation on one rank: its step, its teachers, and its exchanges."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import numpy as np

from hvd_compress.agreement import Terms, listed
from hvd_compress.backends import backend_of
from hvd_compress.base import Array
from hvd_compress.config import check_choice
from hvd_compress.engines.base import Engine
from hvd_compress.engines.joining import Member, joined
from hvd_compress.errors import UnsupportedError
from hvd_compress.integrations.checkpoints import entry, refused, whole
from hvd_compress.requests.base import itemsize
from hvd_compress.stats import Record, Stats
from hvd_compress.systems.base import Arrays
from hvd_compress.systems.teachers.exchanges import (
    Counterparts,
    Exchange,
    exchange_checkpoints,
    exchange_predictions,
    fingerprint_of,
)
from hvd_compress.systems.teachers.method import Codistillation

_VERSION = 1


class Codistiller:
    """Runs codistillation on this rank, over an engine.

    A training loop calls it in every step, with its task loss and outputs z at hand::

        codistiller.next_step()
        outputs = codistiller.predictions(z, [x])            # exchange="predictions"
        teachers = codistiller.checkpoints(lambda: theta)    # exchange="checkpoints"
        outputs = codistiller.usable([predict(theta_j, x) for theta_j in teachers])
        if outputs and codistiller.weight:
            loss = loss + codistiller.weight * distance(z, target(view, outputs))

    Steps with an exchange are collectives; all ranks take equally many steps.

    Args:
        method: the options.
        engine: carries the exchanges, for instance :class:`hvd_compress.mpi.MpiEngine`.
        like: an array of the kind in which ranks compare what must be equal; ``None`` for NumPy's.

    Attributes:
        method: the options.
        step: the number of the step under way, from 1.
        exchanges: the number of exchanges that this rank has begun.
        teachers: the arrays of the other models by name; empty before the first exchange.
    """

    def __init__(self, method: Codistillation, engine: Engine, *, like: Array = None) -> None:
        self.method, self.engine = method, engine
        self.step = self.exchanges = 0
        self.teachers: list[Arrays] = []
        self.record = Record()
        self._like = np.empty(0) if like is None else like
        self._started: int | None = None  # the step whose checkpoints are under way
        self._changing: frozenset[str] | None = None  # as of the last exchange
        self._warned: set[int] = set()
        self.counterparts  # noqa: B018, raises if the groups do not fit

    @property
    def counterparts(self) -> Counterparts:
        """With whom this rank exchanges."""
        return self.method.counterparts(self.engine.rank, self.engine.size)

    @property
    def weight(self) -> float:
        """The weight of the distillation loss in this step."""
        return self.method.weight_at(self.step)

    def next_step(self) -> None:
        """Begin a step."""
        self.step += 1

    def predictions(self, own: Array, inputs: Sequence[np.ndarray] = ()) -> list[Array]:
        """Return what the teachers predict on the batch of this step; empty in steps without
        exchange.  A collective.

        Args:
            own: this model's predictions; the same shape and dtype on all ranks.
            inputs: of this batch, which ranks compare; none to trust that they are the same.

        Raises:
            MismatchError: the ranks differ in options, step, or batch.
        """
        peers = self.counterparts
        if not (peers.sources and self.weight and self.method.is_due(self.step)):
            return []
        fingerprint = fingerprint_of(inputs)
        self._agree({})
        self._start(exchange_predictions(own, peers, self.method.values, fingerprint), [own])
        return self.usable(self._arrived())

    def checkpoints(
        self, arrays: Callable[[], Arrays], changing: Callable[[], Sequence[str]] | None = None
    ) -> list[Arrays]:
        """Return the teachers' arrays, and send this rank's where that is due.  A collective.

        Args:
            arrays: returns all that a teacher's prediction needs and that training changes on any
                rank: floats, with the same names, shapes and dtypes on all ranks.
            changing: returns the names of those that still change, ``None`` for all.  What is
                frozen is sent once, and again after it has changed.
        """
        peers = self.counterparts
        if not peers.sources:
            return []
        if self.method.is_due(self.step):
            own = arrays()
            names = frozenset(own if changing is None else changing())
            # What was frozen since the last exchange has changed since then.
            due = own.keys() if self._changing is None else names | self._changing
            sent = {name: x for name, x in own.items() if name in due}
            self._changing = names
            shapes = [(name, backend_of(x).shape(x)) for name, x in sent.items()]
            self._agree({"model": listed(shapes)})
            if sent:
                exchange = exchange_checkpoints(sent, peers, self.method.values)
                self._start(exchange, list(sent.values()))
                self._started = self.step
        if self._started is not None:
            if self.step >= self._started + self.method.delay:
                self._take_up()
            else:
                self.engine.poll()
        return self.teachers

    def usable(self, outputs: Sequence[Array]) -> list[Array]:
        """Return the teachers' outputs without those that are NaN or Inf."""
        found = []
        sources = self.counterparts.sources
        for rank, x in zip(sources, outputs, strict=True):
            if bool(backend_of(x).all_finite(x)):
                found.append(x)
            elif rank not in self._warned:
                self._warned.add(rank)
                warnings.warn(
                    f"NaN or Inf in what the model of rank {rank} predicts in step {self.step}: it "
                    "is no teacher in such steps",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return found

    def stats(self) -> Stats:
        """Return the exact bytes so far; ``steps`` are exchanges, and "dense" is what they would
        have sent in the dtypes of predictions and parameters."""
        return Stats({self.method.exchange: self.record})

    # -- exchanges ---------------------------------------------------------------------------

    def _agree(self, more: Terms) -> None:
        terms: Terms = {"codistillation": repr(self.method), "step": str(self.step), **more}
        self.engine.agree(terms, self._like)

    def _start(self, exchange: Exchange, own: Sequence[Array]) -> None:
        copies = len(self.counterparts.targets)
        for x in own:
            xp = backend_of(x)
            self.record.dense_bytes += copies * xp.size(x) * itemsize(xp.dtype(x))
            self.record.elements += copies * xp.size(x)
            self.record.elements_sent += copies * xp.size(x)
        member = Member("codistillation", _one(exchange), self.record)
        self.engine.start("codistillation", joined([member], self.engine.rank, self.engine.size))
        self.exchanges += 1
        self.record.steps += 1

    def _arrived(self) -> Any:
        (reply,) = self.engine.finish()["codistillation"]["codistillation"]
        return reply

    def _take_up(self) -> None:
        arrived, self._started = self._arrived(), None
        before = self.teachers or [{} for _ in arrived]
        self.teachers = [{**old, **new} for old, new in zip(before, arrived, strict=True)]

    # -- checkpoints -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank; the teachers in it are this rank's own.  It waits for an
        exchange that is under way."""
        if self._started is not None:
            self._take_up()
        return {
            "version": _VERSION,
            "exchange": self.method.exchange,
            "step": self.step,
            "rank": self.engine.rank,
            "size": self.engine.size,
            "teachers": [dict(arrays) for arrays in self.teachers],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], own: Arrays) -> None:
        """Restore what :meth:`state_dict` returned on this rank.  What another rank returned has
        the step alone: there are no teachers then until the next exchange.

        Args:
            own: this model's arrays, for names and shapes.

        Raises:
            ConfigError: it belongs to another model or version, or it is damaged; then nothing has
                changed.
        """
        if (version := whole(state_dict, "version")) != _VERSION:
            raise refused(f"it has version {version}, not {_VERSION}")
        check_choice("exchange", entry(state_dict, "exchange", str), (self.method.exchange,))
        step, rank = whole(state_dict, "step"), whole(state_dict, "rank")
        size = whole(state_dict, "size", 1)
        teachers = [
            _checked(arrays, own) for arrays in entry(state_dict, "teachers", (list, tuple))
        ]
        is_own = (rank, size) == (self.engine.rank, self.engine.size)
        if is_own and teachers and len(teachers) != len(self.counterparts.sources):
            raise refused(f"it has {len(teachers)} teachers, of other groups of ranks")
        if self._started is not None:
            self._take_up()  # which is of another run
        self.step, self.teachers = step, teachers if is_own else []
        self._changing = None


def _checked(arrays: Any, own: Arrays) -> Arrays:
    if not isinstance(arrays, Mapping) or arrays.keys() != own.keys():
        raise refused("its teachers are of another model")
    for name, x in arrays.items():
        try:
            shape = backend_of(x).shape(x)
        except UnsupportedError as error:
            raise refused(f"{name!r}: {error}") from None
        if shape != backend_of(own[name]).shape(own[name]):
            raise refused(f"{name!r} has shape {shape}: it is of another model")
    return {name: backend_of(x).copy(x) for name, x in arrays.items()}


def _one(exchange: Exchange) -> Generator[Any, Any, tuple[Any]]:
    return ((yield from exchange),)
