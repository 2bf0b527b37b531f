"""Values that the ranks must have in common, beside all that an exchange knows: the numbers of the
optimizer, and the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_compress.agreement import SAMPLED_EVERY, WEIGHTS, Terms

from .binding import Binding
from .runtime import Common, Number
from .slots import native

#: variables, and elements of each, that are looked at
_VARIABLES, _ELEMENTS = 4, 4
#: options of Keras's optimizers that are no numbers of a step, or are looked at in every step
_LEFT_OUT = {"name", "learning_rate", "jit_compile", "is_legacy_optimizer"}


def sample_of(binding: Binding, variables: Sequence[Any]) -> Common:
    """Return some elements of some variables, and zeros but for one step in ``SAMPLED_EVERY``.

    The first step is left out: users broadcast the weights after it, when all variables exist.
    """
    some = variables[:: -(-len(variables) // _VARIABLES)] if variables else []
    places = [
        (native(variable), slice(None, None, -(-size // _ELEMENTS)))
        for variable in some
        if (size := variable.shape.num_elements() if variable.shape is not None else 0)
    ]
    labels = tuple(
        f"{v.name}[{place}]"
        for v, chosen in places
        for place in range(v.shape.num_elements())[chosen]
    )
    step = binding.step.value()

    def sample() -> tf.Tensor:
        own = [tf.reshape(v.value(), [-1])[chosen] for v, chosen in places]
        return tf.concat([tf.cast(x, tf.float64) for x in own], 0)

    is_due = (step > 0) & (step % SAMPLED_EVERY == 0)
    none = tf.zeros([len(labels)], tf.float64)
    return Common({}, {WEIGHTS: Number(tf.cond(is_due, sample, lambda: none), labels)})


def numbers_of(binding: Binding, optimizer: Any) -> Common:
    """Return the numbers of an optimizer of Keras: what a graph holds, and the learning rate.

    The rate is left out in the first step, after which users broadcast the variables.
    """
    with tf.init_scope():
        config = optimizer.get_config()
    texts = [f"{name}={text}" for name, x in sorted(config.items()) if (text := _text(name, x))]
    terms: Terms = {"optimizer": [type(optimizer).__name__, *texts]}
    rate = tf.cast(tf.convert_to_tensor(optimizer.learning_rate), tf.float64)
    rate = tf.where(tf.equal(binding.step, 0), tf.zeros_like(rate), rate)
    return Common(terms, {"optimizer": Number(tf.reshape(rate, [1]), ("learning_rate",))})


def _text(name: str, x: Any) -> str:
    parts = x if isinstance(x, list | tuple) else [x]
    if name in _LEFT_OUT or not all(isinstance(p, bool | int | float | None) for p in parts):
        return ""
    return ", ".join(f"{p:.9g}" if isinstance(p, float) else str(p) for p in parts)
