"""The runtime that carries exchanges for the bindings to TensorFlow: Horovod, or MPI alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from hvd_compress.agreement import Terms
from hvd_compress.engines.base import Engine


class Number(NamedTuple):
    """A number that is known only when a graph runs, as int64 or float64: a scalar, or a vector
    with a label for each element."""

    value: tf.Tensor
    labels: tuple[str, ...] = ()


class Common(NamedTuple):
    """The terms that ranks must have in common: by name what is known while a graph is traced, and
    what is known when it runs."""

    terms: Terms
    numbers: Mapping[str, Number]

    def known(self, values: Iterable[np.ndarray]) -> Terms:
        """Return all of it as terms, given the values of the numbers; those with labels are
        entries of a list."""
        found = dict(self.terms)
        for (name, number), value in zip(self.numbers.items(), values, strict=True):
            if not number.labels:
                found[name] = str(value)
                continue
            pairs = zip(number.labels, value.tolist(), strict=True)
            found[name] = [*found.get(name, []), *(f"{label} = {x:.9g}" for label, x in pairs)]
        return found


class Runtime(Protocol):
    """Ranks and how they exchange."""

    @property
    def hvd(self) -> Any:
        """The module ``horovod.tensorflow``, or another with its functions."""

    def engine(
        self, process_set: Any, predivide: float, prefix: str, agreed: tf.Tensor | None
    ) -> Engine:
        """Return an engine whose exchanges are traced.

        Args:
            process_set: two ranks or more, and this one among them.
            predivide: arrays are divided by it before they are added, and sums multiplied by it.
            prefix: of the names of collectives, the same on all ranks.
            agreed: a scalar that is true as soon as collectives may start; ``None``: at once.
        """

    def agreement(self, common: Common, name: str, process_set: Any) -> tf.Tensor:
        """Return a tensor that is there only after all ranks are known to agree; see
        :mod:`hvd_compress.agreement`.

        When the graph runs and they do not, it fails on every rank with a ``MismatchError``, which
        TensorFlow shows inside of an error of its own.

        Args:
            common: what ranks must have in common.
            name: of the collective.
        """
