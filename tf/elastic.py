"""Drop-in for ``horovod.tensorflow.elastic``: training that continues when workers change::

    state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0)

    @hvd.elastic.run
    def train(state): ...

The residuals of a compression are part of the state.  The number of ranks is part of a graph, so
graphs of Keras are made again when it changes.  A ``tf.function`` of your own that exchanges
gradients must be made inside ``train``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import horovod.tensorflow as horovod
import tensorflow as tf
from horovod.common.elastic import ObjectState
from horovod.common.exceptions import HorovodInternalError

from hvd_compress.errors import UnsupportedError
from hvd_compress.integrations.horovod import rest_of

from .binding import VariableBinding
from .slots import variables_of_both


class TensorFlowKerasState(ObjectState):
    """A model and its optimizer, of Keras 3 or tf_keras, and what you want to keep with them.

    A commit keeps every rank's own residuals; when the set of workers changes, all start from the
    mean over those that have one.

    Args:
        model: built.
        optimizer: where it is not the one that the model was compiled with.
        backend: not needed; Horovod's callers may pass it.
        kwargs: further values, attributes of this object, that rank 0 has for all.

    Raises:
        ValueError: the model is not built.
        UnsupportedError: the optimizer lets ranks differ for some steps (``ZeroOneAdam``).
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        if not getattr(model, "built", True):
            raise ValueError("the model is not built: model.build(input_shape), or keras.Input")
        self.model = model
        self.optimizer = optimizer or model.optimizer
        if hasattr(self.optimizer, "synchronize_parameters"):
            raise UnsupportedError(
                "ranks whose parameters differ between synchronizations have no common state that "
                "an elastic run could go back to: use hvd.OneBitAdam instead of hvd.ZeroOneAdam"
            )
        if hasattr(self.optimizer, "build"):  # new workers need all that others have
            self.optimizer.build(model.trainable_variables)
        self._keep()
        super().__init__(bcast_object=horovod.broadcast_object, get_rank=horovod.rank, **kwargs)

    def save(self) -> None:
        self._keep()
        super().save()

    def restore(self) -> None:
        for variable, value in self._kept:
            variable.assign(value)
        for binding, (header, entries) in self._commits:
            binding.restore(header, entries)
        super().restore()

    def sync(self) -> None:
        for binding in self._bindings():
            binding.unite()
        horovod.broadcast_variables(variables_of_both(self.model, self.optimizer), 0)
        self._keep()
        super().sync()

    def reset(self) -> None:
        """Forget traced graphs, since there may be another number of ranks."""
        self.model.train_function = None
        for binding in self._bindings():
            binding.forget_graphs()

    def _keep(self) -> None:
        # They are equal on all ranks.
        everyones = variables_of_both(self.model, self.optimizer)
        self._kept = [(v, tf.identity(v)) for v in everyones]
        self._commits = [(binding, binding.kept()) for binding in self._bindings()]

    def _bindings(self) -> Iterator[VariableBinding]:
        for name in ("compression", "local_compression"):
            if isinstance(binding := getattr(self.optimizer, name, None), VariableBinding):
                yield binding


def wrap_run(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return Horovod's ``run``, which takes the failure of any collective for the loss of a worker.
    Training then starts again from the last commit.  Horovod's own knows only some collectives by
    name."""

    @functools.wraps(run)
    def wrapped(func: Callable[..., Any]) -> Any:
        @functools.wraps(func)
        def train(state: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return func(state, *args, **kwargs)
            except (tf.errors.UnknownError, tf.errors.AbortedError) as error:
                if "Horovod" not in str(error):
                    raise
                raise HorovodInternalError(error) from error

        return run(train)

    return wrapped


def __getattr__(name: str) -> Any:
    """Return a name of Horovod's module that this one does not replace."""
    return rest_of(horovod.elastic, name, __name__, "TensorFlow")
