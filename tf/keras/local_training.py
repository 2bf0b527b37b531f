"""``hvd.DistributedOptimizer(optimizer, method=...)`` for Keras 3; the methods themselves are in
:mod:`hvd_compress.systems`.

The work around a local step is Python on NumPy arrays.  Graphs call it, and assign its results only
if it has changed something.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.systems import Coordinator, TrainingMethod, codistiller
from hvd_compress.systems.base import Arrays, as_training_method

from ..distribute import check_backend, check_not_distributed, is_keras_3
from ..optimizer import NotInLossScaling, made_like, variables_of
from ..runtime import Runtime, check_context, in_python
from ..slots import native
from .codistillation import KerasCodistiller

_NO_SCALING = (
    "local steps and loss scaling do not go together in Keras, since a rank alone cannot skip a "
    "step: use bfloat16 or float32, for instance the policy mixed_bfloat16"
)


class KerasLocalStepsOptimizer(NotInLossScaling):
    """Mixed into the class of an optimizer: ``apply`` is a local step with what a training method
    does around it.  All ranks take equally many steps, and all steps are on the same variables.

    Attributes:
        training: the method with its state: ``stats()``, ``exchanges``, ``set_epoch(epoch)``,
            ``state_dict()`` and ``load_state_dict()``, whose arrays are NumPy's.
    """

    training: Coordinator
    _reported: Any = None
    instead_of_scaling = _NO_SCALING

    def report(self, loss: Any) -> None:
        """Tell the loss of this rank's batch before ``apply``, in the same function, for methods
        that choose by it; ``model.fit`` does so by itself."""
        self._reported = loss

    def scale_loss(self, loss: Any) -> Any:
        """Report the loss, too: Keras calls this in every step of ``model.fit``."""
        self.report(loss)
        return super().scale_loss(loss)  # type: ignore[misc]

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        check_context()
        variables = self._built_for(grads, trainable_variables)
        loss, self._reported = self._reported, None
        if self.training.method.loss_window:
            self._check_reported(loss)
        # Its input is that of before the local step, and what it returns is stepped from.
        known = [tf.cast(self.learning_rate, tf.float64)]  # type: ignore[attr-defined]

        def before(training: Coordinator, parameters: Arrays, rate: Any, *losses: Any) -> Arrays:
            for loss in losses:
                training.report(float(loss))
            return training.before_step(parameters, rates=dict.fromkeys(parameters, float(rate)))

        self._replace(before, variables, [*known, *([] if loss is None else [loss])])
        super().apply(grads, variables)  # type: ignore[misc]
        self._replace(Coordinator.after_step, variables)

    def _built_for(self, grads: Any, given: Any) -> list[Any]:
        """Return the variables, which are those that the optimizer was built for."""
        variables = variables_of(self, grads, given)
        # Their arrays go by their places.
        known = [id(native(v)) for v in self._trainable_variables]  # type: ignore[attr-defined]
        if [id(native(v)) for v in variables] != known:
            raise ConfigError(
                f"{len(variables)} variables in this step, which are not the {len(known)} that the "
                "optimizer was built for: local steps are on all of these, in their order; make a "
                "new optimizer for other variables, for instance after freezing a layer"
            )
        return variables

    def _check_reported(self, loss: Any) -> None:
        name = type(self.training.method).__name__
        if loss is None:
            raise ConfigError(
                f"{name} chooses by the training loss: call optimizer.report(loss) before "
                "apply(gradients, variables), or use model.fit"
            )
        if not tf.executing_eagerly() and not tf.is_symbolic_tensor(loss):
            raise ConfigError(
                f"{name} chooses by the training loss, and this graph would take the loss of now "
                "for that of all steps: call optimizer.report(loss) inside of the tf.function, "
                "with the tensor of its loss"
            )

    def _replace(
        self, function: Callable[..., Arrays], variables: Sequence[Any], known: Sequence[Any] = ()
    ) -> None:
        """Replace the variables by what the function makes of the training, of them and of what is
        ``known``."""
        own = [native(v) for v in variables]
        names = [f"{i}.{v.name}" for i, v in enumerate(variables)]

        def run(self: KerasLocalStepsOptimizer, *inputs: tf.Tensor) -> list[tf.Tensor]:
            before, more = inputs[: len(names)], inputs[len(names) :]
            arrays = {name: _array(x) for name, x in zip(names, before, strict=True)}
            after = function(self.training, dict(arrays), *more)
            changed = [x for name, x in arrays.items() if after[name] is not x]
            is_lost = not self.training.method.state_is_own and not all(
                np.isfinite(x).all() for x in changed
            )
            made = [
                x if after[name] is arrays[name] else tf.cast(after[name], x.dtype)
                for name, x in zip(names, before, strict=True)
            ]
            return [tf.constant(bool(changed)), tf.constant(is_lost), *made]

        values = [*(v.value() for v in own), *known]
        dtypes = [tf.bool, tf.bool, *(v.dtype for v in own)]
        is_new, is_lost, *made = in_python(self, run, values, dtypes)

        def assign() -> tf.Tensor:
            for v, x in zip(own, made, strict=True):
                v.assign(tf.ensure_shape(x, v.shape))
            return tf.constant(True)

        tf.cond(is_new, assign, lambda: tf.constant(False))
        tf.cond(is_lost, self._begin_anew, lambda: tf.constant(False))

    def _begin_anew(self) -> tf.Tensor:
        """Begin again with momentum that is NaN or Inf: it would lead there again, and all
        exchanges would be lost."""
        for v in map(native, self.variables):  # type: ignore[attr-defined]
            if v.dtype.is_floating:
                v.assign(tf.where(tf.math.is_finite(v), v, tf.zeros_like(v)))
        return tf.constant(True)

    def synchronize_parameters(self) -> None:
        """Give all ranks the parameters that are to be tested: for most methods the average of the
        ranks' own.  A collective, for the end of training, outside of graphs."""
        variables = list(self._trainable_variables)  # type: ignore[attr-defined]
        self._replace(Coordinator.consensus, variables)

    @contextlib.contextmanager
    def synchronized_parameters(self) -> Iterator[None]:
        """In this context the parameters are those to be tested and saved; after it they are this
        rank's own again.  A collective."""
        own = [(v, v.numpy()) for v in self._trainable_variables]  # type: ignore[attr-defined]
        self.synchronize_parameters()
        try:
            yield
        finally:
            for variable, x in own:
                variable.assign(x)


def _array(x: tf.Tensor) -> np.ndarray:
    return tf.cast(x, tf.float32).numpy() if x.dtype == tf.bfloat16 else x.numpy()


def train_locally(
    runtime: Runtime,
    optimizer: Any,
    method: TrainingMethod | type[TrainingMethod],
    *,
    process_set: Any = None,
    seed: int = 0,
) -> Any:
    """Return an optimizer like ``optimizer``, of Keras 3, that trains by ``method``."""
    method = as_training_method(method)
    check_not_distributed(optimizer)
    if not is_keras_3(optimizer):
        raise ConfigError(
            f"training methods (method=) are for keras.optimizers of Keras 3; got "
            f"{type(optimizer).__name__}: leave method out, and pass a compression"
        )
    check_backend()
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise UnsupportedError(_NO_SCALING)
    if optimizer.built:
        raise ConfigError("this optimizer has been used already: pass a new one")
    engine = runtime.eager_engine(process_set, "hvd_compress.local_steps", np.ndarray)
    new = made_like(optimizer, KerasLocalStepsOptimizer)
    new.training, new.may_be_wrapped = Coordinator(method, engine, seed=seed), False
    return new


@functools.cache
def systems_over(runtime: Runtime, module: str) -> dict[str, Any]:
    """Return what systems add to ``module`` by name."""
    engine = functools.partial(
        runtime.eager_engine, prefix="hvd_compress.codistillation", arrays=tf.Tensor
    )
    return codistiller.systems_over(KerasCodistiller, engine, module)
