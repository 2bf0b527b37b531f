"""Codistillation on one rank: its teachers, and when they are exchanged."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hvd_compress.agreement import Terms, listed
from hvd_compress.backends import backend_of
from hvd_compress.base import Array
from hvd_compress.config import check_choice
from hvd_compress.engines.base import Engine
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.reduce.state_file import entry, refused
from hvd_compress.requests.dense import itemsize
from hvd_compress.stats import Stats
from hvd_compress.systems import graphs, rounds
from hvd_compress.systems.base import Arrays
from hvd_compress.systems.codistillation import Codistillation, Ramp, WeightDecay
from hvd_compress.systems.counterparts import Counterparts, exchange, fingerprint_of
from hvd_compress.systems.owner import Owner

#: what ranks that exchange predictions compare
_OUTPUTS = "predictions, of batches that must be equal, without a smaller one at the end"
_INPUTS = (
    "inputs, which must be the same examples in the same order and with the same augmentation "
    "unless exchange='checkpoints'"
)


class Codistiller(Owner):
    """Runs codistillation on this rank, over an engine, in every step of a loop::

        codistiller.next_step()
        outputs = codistiller.predictions(z, [x])  # z: this model's outputs of the batch x
        if outputs and codistiller.weight:
            loss = loss + codistiller.weight * distance(z, target(view, outputs))

    With ``exchange="checkpoints"`` outputs are ``usable([predict(theta, x) for theta in
    checkpoints()])``, and a subclass knows the model: :meth:`arrays`, :meth:`changing`.

    Args:
        method: the options.
        engine: carries the exchanges, for instance :class:`hvd_compress.mpi.MpiEngine`.
        like: an array of the kind in which ranks compare what must be equal; ``None`` for NumPy's.

    >>> from hvd_compress.engines.local import LocalEngine
    >>> codistiller = Codistiller(Codistillation(exchange="predictions"), LocalEngine())
    >>> codistiller.next_step()
    >>> codistiller.step, codistiller.weight, codistiller.teachers  # a single rank has nobody
    (1, 1.0, [])
    """

    def __init__(self, method: Codistillation, engine: Engine, *, like: Array = None) -> None:
        super().__init__("codistillation", like)
        self.method, self.engine = method, engine
        self._changing: frozenset[str] | None = None  # as of the last exchange
        self._warned: set[int] = set()
        self.counterparts  # noqa: B018, raises if the groups do not fit

    @property
    def teachers(self) -> list[Arrays]:
        """The arrays of the other models by name; empty before the first exchange."""
        return list(self.state.values())

    @property
    def counterparts(self) -> Counterparts:
        """The ranks with which this rank exchanges."""
        return self.method.counterparts(self.engine.rank, self.engine.size)

    @property
    def weight(self) -> float:
        """The weight of the distillation loss in this step."""
        return self.method.weight_at(self.step)

    @property
    def weight_decay(self) -> float:
        """The optimizers' weight decay in this step.

        Raises:
            ConfigError: there is no schedule, ``weight_decay=WeightDecay(...)``.
        """
        if self.method.weight_decay is None:
            raise ConfigError(
                "there is no schedule of the weight decay: make Codistillation(model, "
                "weight_decay=WeightDecay(values=(5e-4, 1e-5, 0.0), at_steps=(3000, 6000)))"
            )
        return self.method.weight_decay.at(self.step)

    def arrays(self) -> Arrays:
        """Return the floats of the model by name that a prediction needs and training changes on
        any rank.  Names, shapes and dtypes are the same on all ranks."""
        return {}

    def changing(self) -> Sequence[str]:
        """Return the names of those arrays that still change.  A frozen array is sent once, and
        again after it has changed."""
        return list(self.arrays())

    def next_step(self) -> None:
        """Begin a step."""
        self.step += 1

    def predictions(self, own: Array, inputs: Sequence[np.ndarray] = ()) -> list[Array]:
        """Return what the teachers predict on the batch of this step; empty in steps without
        exchange.  A collective.

        Args:
            own: this model's predictions; the same shape and dtype on all ranks.
            inputs: of this batch, which ranks compare unless there are groups; none to trust that
                they are the same.
        """
        peers = self.counterparts
        if not (peers.sources and self.weight and self.method.is_due(self.step)):
            return []
        xp = backend_of(own)
        same = {} if self.method.groups else {_INPUTS: fingerprint_of(inputs)}
        self._agree(**{_OUTPUTS: f"{xp.dtype(own)} {[*xp.shape(own)]}", **same})
        self._count([own])
        found = self._ask(exchange({"": own}, peers, self.method.values))
        return self.usable([arrays[""] for arrays in found])

    def checkpoints(self) -> list[Arrays]:
        """Return the teachers' arrays, and send this rank's where that is due.  A collective."""
        peers = self.counterparts
        if peers.sources and self.method.is_due(self.step):
            own, names = self.arrays(), frozenset(self.changing())
            # What was frozen since the last exchange has changed since then.
            due = own.keys() if self._changing is None else names | self._changing
            sent = {name: x for name, x in own.items() if name in due}
            self._changing = names
            self._agree(model=listed((n, backend_of(x).shape(x)) for n, x in sent.items()))
            if not sent:
                self.engine.compare()  # others may send something
            else:
                self._count(list(sent.values()))
                found = self._ask(exchange(sent, peers, self.method.values))
                for source, new in zip(peers.sources, found, strict=True):
                    self.state[str(source)] = {**self.state.get(str(source), {}), **new}
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

    def terms(self) -> Terms:
        return {"codistillation": repr(self.method), "step": str(self.step)}

    def _count(self, own: Sequence[Array]) -> None:
        copies, record = len(self.counterparts.targets), self.record
        for x in own:
            xp = backend_of(x)
            record.dense_bytes += copies * xp.size(x) * itemsize(xp.dtype(x))
            record.elements += copies * xp.size(x)
            record.elements_sent += copies * xp.size(x)
        self.exchanges += 1
        record.steps += 1

    # -- checkpoints -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank; the teachers in it are this rank's own."""
        return self._saved(self.state, exchange=self.method.exchange)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict` on this rank.  The result of another rank
        restores the step alone: there are no teachers then until the next exchange.

        Raises:
            ConfigError: it belongs to another model or version, or it is damaged; then nothing has
                changed.
        """
        own = self.arrays()

        def check(_: str, arrays: Arrays) -> None:
            _check(arrays, own)

        saved = self._read(state_dict, check)
        check_choice("exchange", entry(state_dict, "exchange", str), (self.method.exchange,))
        if saved.is_own and not saved.state.keys() <= {*map(str, self.counterparts.sources)}:
            raise refused(f"it has teachers of other groups of ranks: {sorted(saved.state)}")
        if any(arrays.keys() != own.keys() for arrays in saved.state.values()):
            raise refused("its teachers are of another model")
        self.state = saved.state if saved.is_own else {}
        self.step, self._changing = saved.header.step, None


def _check(arrays: Arrays, own: Arrays) -> None:
    if not arrays.keys() <= own.keys():
        raise refused("its teachers are of another model")
    for name, x in arrays.items():
        try:
            shape = backend_of(x).shape(x)
        except UnsupportedError as error:
            raise refused(f"{name!r}: {error}") from None
        if shape != backend_of(own[name]).shape(own[name]):
            raise refused(f"{name!r} has shape {shape}: it is of another model")


_MORE = """

    Give it the model before the first step, and call ``loss`` in every step, on all ranks::

        codistillation = hvd.Codistillation(model, every=50, burn_in=500)
        for x, y in batches:
            logits = model(x)
            loss = codistillation.loss(cross_entropy(logits, y), logits, x)
            ...

    Making one is a collective.  Beside the options it takes:

        model: this rank's, or its group's.  All have the same parameters by name and shape, and
            begin with other values or see other data.
        process_set: the ranks that take part; ``None`` for all.

    With ``weight_decay=WeightDecay(...)`` call ``set_weight_decay(optimizer)`` behind ``loss``
    (PyTorch).

    Attributes: ``weight``, alpha of this step, and ``weight_decay``; ``step``; ``exchanges``;
    ``method``, the options.
"""


def codistillation_over(
    base: type[Codistiller], make_engine: Callable[[Any], Engine], module: str
) -> type[Codistiller]:
    """Return the class ``Codistillation`` of a framework, over the engines that ``make_engine``
    makes of process sets; it belongs to ``module``.

    Args:
        base: is made from a model, the options of :class:`Codistillation`, and ``process_set``.
    """
    kinds, own = inspect.Parameter, inspect.signature(Codistillation).parameters.values()
    model = kinds("model", kinds.POSITIONAL_OR_KEYWORD)
    process_set = kinds("process_set", kinds.KEYWORD_ONLY, default=None)
    members = {
        "make_engine": staticmethod(make_engine),
        "__signature__": inspect.Signature([model, *own, process_set]),
        "__doc__": f"{inspect.getdoc(Codistillation)}\n\n{inspect.cleandoc(_MORE)}",
        "__module__": module,
    }
    return type("Codistillation", (base,), members)


def systems_over(
    base: type[Codistiller], make_engine: Callable[[Any], Engine], module: str
) -> dict[str, Any]:
    """Return what systems add to the ``module`` of a framework, by name; the arguments are those of
    :func:`codistillation_over`."""
    return {
        **rounds.METHODS,
        **graphs.METHODS,
        "Codistillation": codistillation_over(base, make_engine, module),
        "Ramp": Ramp,
        "WeightDecay": WeightDecay,
    }
