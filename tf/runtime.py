"""What the bindings to TensorFlow need of what carries their exchanges: Horovod, or MPI alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import tensorflow as tf

from hvd_compress.agreement import Terms
from hvd_compress.engines.base import Engine


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
            predivide: sums are scaled by 1 / predivide before and by predivide after adding.
            prefix: of the names of collectives, the same on all ranks.
            agreed: a scalar that is true as soon as collectives may start; ``None``: at once.
        """

    def agreement(
        self, terms: Terms, counts: Mapping[str, tf.Tensor], name: str, process_set: Any
    ) -> tf.Tensor:
        """Return a tensor that is there only after all ranks are known to agree; see
        :mod:`hvd_compress.agreement`.

        When the graph runs and they do not, it fails on every rank with a ``MismatchError``, which
        TensorFlow shows inside of an error of its own.

        Args:
            terms: what is known while the graph is traced.
            counts: what is known only when it runs, scalars of int64 or float64.
            name: of the collective.
        """
