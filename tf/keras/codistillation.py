"""``hvd.Codistillation(model, ...)`` for Keras 3; see :mod:`hvd_compress.systems.teachers`.

Exchanges are Python between graphs: a graph calls them once in every step.
"""

from __future__ import annotations

import inspect
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.systems.base import Arrays
from hvd_compress.systems.distillation import Functions, losses_over, target
from hvd_compress.systems.teachers import Codistillation, Codistiller

from ..runtime import check_context, in_python
from ..slots import native

#: those of :mod:`hvd_compress.systems.distillation`
LOSSES = losses_over(
    Functions(
        log_softmax=tf.nn.log_softmax,
        exp=tf.exp,
        log=lambda p: tf.math.log(tf.where(p > 0, p, tf.ones_like(p))),
        sums=lambda x: tf.reduce_mean(tf.reduce_sum(x, -1)),
        mean=tf.reduce_mean,
    )
)


class KerasCodistiller(Codistiller):
    make_engine: Any

    def __init__(self, model: Any, *args: Any, process_set: Any = None, **options: Any) -> None:
        method = Codistillation(*args, **options)
        if not isinstance(model, keras.Model):
            raise ConfigError(f"model must be a keras.Model of Keras 3, not {type(model).__name__}")
        if method.weight_decay is not None:
            raise UnsupportedError(
                "weight_decay is for PyTorch: Keras reads an optimizer's when it traces a "
                "graph. Leave it out"
            )
        super().__init__(method, self.make_engine(process_set), like=tf.zeros(0))
        self.model = model

    def loss(self, task: Any, outputs: Any, inputs: Any = None) -> tf.Tensor:
        """Return the task's loss and the weighted distillation loss, eagerly or in a graph.  Call
        it once in every step, on all ranks; a step with an exchange is a collective.

        Args:
            task: the loss of this batch, a scalar.
            outputs: the model's, one tensor of logits (of any numbers for "mse"), with classes in
                the last dimension; half precision is computed with in float32.
            inputs: what the model was called with, a tensor or a nest of them: teachers are called
                with it as well.  With ``exchange="predictions"`` ranks compare it, and nothing if
                it is ``None``.

        Raises:
            ConfigError: teachers need the inputs, and there are none.
            MismatchError: the ranks differ in options, step or model; or, with
                ``exchange="predictions"``, in the batch.  Graphs show it inside of an error of
                TensorFlow.
        """
        check_context()
        z = tf.convert_to_tensor(outputs)
        z = tf.cast(z, tf.float32) if z.dtype in (tf.float16, tf.bfloat16) else z
        if inputs is None and self.method.exchange == "checkpoints":
            raise ConfigError(
                "teachers predict on this rank's batch: write codistillation.loss(task, logits, x)"
            )
        flat = [] if inputs is None else tf.nest.flatten(inputs)

        def of_teachers(self: Any, z: tf.Tensor, *flat: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            nest = tf.nest.pack_sequence_as(inputs, flat) if flat else None
            return self._target(z, nest, flat)

        given, dtypes = [tf.stop_gradient(z), *flat], [z.dtype, z.dtype]
        goal, weight = map(tf.stop_gradient, in_python(self, of_teachers, given, dtypes))
        goal.set_shape(z.shape)
        weight.set_shape([])
        distance = LOSSES[self.method.loss].distance
        none = tf.zeros([], z.dtype)
        own = tf.cond(weight > 0, lambda: weight * distance(z, goal), lambda: none)
        return task + tf.cast(own, tf.convert_to_tensor(task).dtype)

    def use_in_fit(self) -> None:
        """Add the distillation loss to what ``model.fit`` minimises, from now on; the model must
        have one output.  ``model.evaluate`` stays as it is.

        Raises:
            ConfigError: the model ends in a softmax, and the loss takes logits.
        """
        last = self.model.layers[-1] if self.model.layers else None
        ends_in_softmax = getattr(last, "activation", None) is keras.activations.softmax
        if self.method.loss != "mse" and (
            ends_in_softmax or isinstance(last, keras.layers.Softmax)
        ):
            raise ConfigError(
                f"loss={self.method.loss!r} takes the model's outputs for logits, and its last "
                "layer is a softmax: leave that out, and write from_logits=True in the task's "
                "loss; or use loss='mse'"
            )
        plain = self.model.compute_loss
        knows_mode = "training" in inspect.signature(plain).parameters

        def compute_loss(
            x: Any = None,
            y: Any = None,
            y_pred: Any = None,
            sample_weight: Any = None,
            training: bool = True,
        ) -> Any:
            mode = {"training": training} if knows_mode else {}
            task = plain(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, **mode)
            return self.loss(task, y_pred, x) if training else task

        self.model.compute_loss = compute_loss

    def _target(
        self, z: tf.Tensor, inputs: Any, flat: tuple[tf.Tensor, ...]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Run this step, and return the average of the teachers, and the weight, which is 0 if
        there is none."""
        self.next_step()
        if self.method.exchange == "predictions":
            found = self.predictions(z, [np.asarray(x) for x in flat])
        else:
            teachers = self.checkpoints()
            found = self._predict(teachers, inputs, z) if teachers and self.weight else []
        if not found:
            return tf.zeros_like(z), tf.zeros([], z.dtype)
        goal = target(LOSSES[self.method.loss].view, found)
        return goal, tf.constant(self.weight, z.dtype)

    def _predict(self, teachers: list[Arrays], inputs: Any, z: tf.Tensor) -> list[tf.Tensor]:
        names = {id(native(v)): name for name, v in self._variables().items()}
        found = []
        for arrays in teachers:

            def values(variables: Any, arrays: Arrays = arrays) -> list[Any]:
                return [arrays.get(names.get(id(native(v)), ""), v.value) for v in variables]

            model = self.model
            outputs, _ = model.stateless_call(
                values(model.trainable_variables),
                values(model.non_trainable_variables),
                inputs,
                training=False,
            )
            found.append(tf.cast(outputs, z.dtype))
        return self.usable(found)

    def _variables(self) -> dict[str, Any]:
        """Return the model's variables of floats by place and name.  In their paths, Keras numbers
        layers by how many were made before, which may differ between ranks."""
        named = enumerate(self.model.variables)
        return {f"{i}.{v.name}": v for i, v in named if tf.as_dtype(v.dtype).is_floating}

    def arrays(self) -> Arrays:
        return {name: tf.identity(native(v)) for name, v in self._variables().items()}

    def changing(self) -> list[str]:
        """The variables of layers that are trained, batch normalisation's statistics among them."""
        layers = [layer for layer in self.model._flatten_layers() if layer.trainable]
        own = {
            id(native(v))
            for layer in layers
            for v in (*layer._trainable_variables, *layer._non_trainable_variables)
        }
        return [name for name, v in self._variables().items() if id(native(v)) in own]
