"""The class ``hvd.Codistillation(model, ...)`` as users meet it, as far as it knows no
framework."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Mapping, Sized
from typing import Any

from hvd_compress.errors import ConfigError
from hvd_compress.stats import Stats
from hvd_compress.systems.base import Arrays
from hvd_compress.systems.teachers.codistiller import Codistiller
from hvd_compress.systems.teachers.method import Codistillation
from hvd_compress.systems.teachers.sampling import CoordinatedSampler

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


class ModelWithTeachers(abc.ABC):
    """A model and the owner of its teachers; frameworks add the loss."""

    def __init__(self, model: Any, codistiller: Codistiller) -> None:
        self.model = model
        self._codistiller = codistiller

    @property
    def method(self) -> Codistillation:
        return self._codistiller.method

    @property
    def step(self) -> int:
        return self._codistiller.step

    @property
    def weight(self) -> float:
        return self._codistiller.weight

    @property
    def exchanges(self) -> int:
        return self._codistiller.exchanges

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

    @abc.abstractmethod
    def _arrays(self) -> Arrays:
        """Return all of the model that a prediction needs and training changes, by name."""

    def sampler(
        self, examples: Sized | int, *, seed: int = 0, shuffle: bool = True
    ) -> CoordinatedSampler:
        """Return a sampler that gives the same examples to ranks that exchange predictions, and
        shares them in a group."""
        _, _, place, places = self._codistiller.counterparts
        return CoordinatedSampler(examples, seed=seed, place=place, places=places, shuffle=shuffle)

    def stats(self) -> Stats:
        """Return the exact bytes that this rank sent and received so far."""
        return self._codistiller.stats()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's step and teachers.  It waits for an exchange that is under way."""
        return self._codistiller.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned on this rank; of what another rank returned, the
        step alone: there are no teachers then until the next exchange.

        Raises:
            ConfigError: it belongs to another model, or it is damaged; then nothing has changed.
        """
        self._codistiller.load_state_dict(state_dict, self._arrays())


def documented(cls: type[ModelWithTeachers], module: str) -> type[ModelWithTeachers]:
    """Give a class with the options of :class:`Codistillation` their signature and docstring; it
    belongs to ``module``."""
    kinds, name = inspect.Parameter, "Codistillation"
    own = inspect.signature(Codistillation).parameters.values()
    model = kinds("model", kinds.POSITIONAL_OR_KEYWORD)
    process_set = kinds("process_set", kinds.KEYWORD_ONLY, default=None)
    cls.__signature__ = inspect.Signature([model, *own, process_set])  # type: ignore[attr-defined]
    cls.__doc__ = f"{inspect.getdoc(Codistillation)}\n\n{inspect.cleandoc(_MORE)}"
    cls.__name__ = cls.__qualname__ = name
    cls.__module__ = module
    return cls
