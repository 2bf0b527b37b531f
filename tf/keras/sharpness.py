"""SAM for Keras 3; its formula: ``optimizers/sharpness.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvd_compress import optimizers
from hvd_compress.errors import ConfigError
from hvd_compress.optimizers.sharpness import averaged, option

from ..slots import native

Average = Callable[[tf.Tensor], tf.Tensor]


class SAM:
    """Sharpness-aware minimisation: the gradient at w + eps instead of a tape's::

        sam = hvd.SAM(rho=0.05)
        loss, gradients = sam.gradient(lambda: loss_fn(y, model(x, training=True)), variables)
        optimizer.apply(gradients, variables)

    See :class:`hvd_compress.torch.SAM`; the same lines in the ``train_step`` of a model serve
    ``fit``.  Here both passes update statistics of batch normalisation, unless they are listed in
    ``statistics``.

    Args:
        rho: radius of the ball in which the worst weights are looked for, 0 or more.
        average: ``hvd_compress.tensorflow.allreduce`` for the same eps on all ranks, at the cost of
            another dense gradient.  That of Horovod's Keras module takes no symbols.

    >>> w = keras.Variable(1.0)
    >>> loss, [gradient] = hvd.SAM(rho=0.5).gradient(lambda: tf.square(w.value), [w])
    >>> float(loss), float(w), float(gradient)  # the gradient is that at 1 + 0.5
    (1.0, 1.0, 3.0)
    """

    rho = option("rho")

    def __init__(self, rho: float = 0.05, average: Average | None = None) -> None:
        self.formula = optimizers.SAM(rho)
        if average is not None and not callable(average):
            raise ConfigError(
                "average must be a function of a tensor: average=hvd_compress.tensorflow.allreduce"
            )
        self.average = average

    def gradient(
        self,
        loss_of: Callable[[], tf.Tensor],
        variables: Sequence[Any],
        statistics: Sequence[Any] = (),
    ) -> tuple[tf.Tensor, list[tf.Tensor | None]]:
        """Return the loss at w and the gradients at w + eps.

        Args:
            loss_of: computes the loss from scratch, from the same examples each time.  It may
                multiply it by a loss scale, on which eps does not depend.
            variables: the trainable ones.
            statistics: variables that only the first pass may change:
                ``model.non_trainable_variables``, without those of random generators.
        """
        raw = [native(variable) for variable in variables]
        loss, first = _evaluate(loss_of, raw)
        seen = [native(variable) for variable in statistics]
        # In a graph, what reads and writes a variable runs in the order in which it is written.
        kept = [(v, tf.identity(v.value())) for v in (*raw, *seen)]
        self._climb(raw, first)
        _, second = _evaluate(loss_of, raw)
        with tf.control_dependencies([g for g in second if g is not None]):
            for variable, before in kept:
                variable.assign(before)
        return loss, second

    def _climb(self, variables: Sequence[tf.Variable], gradients: Sequence[Any]) -> None:
        weights = [variable.value() for variable in variables]
        if self.average is not None:
            gradients = averaged(weights, gradients, self.average)
        found = self.formula.ascent(weights, gradients)
        for variable, eps in zip(variables, found, strict=True):
            if eps is not None:
                variable.assign_add(eps)


def _evaluate(loss_of: Callable[[], Any], variables: Sequence[Any]) -> tuple[Any, list[Any]]:
    with tf.GradientTape() as tape:
        loss = loss_of()
    found = tape.gradient(loss, variables)
    return loss, [None if g is None else tf.convert_to_tensor(g) for g in found]
