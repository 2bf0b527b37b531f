"""Keras 3 optimizers that step by a formula of :mod:`hvd_compress.optimizers`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import keras
import tensorflow as tf

from hvd_compress.errors import ConfigError
from hvd_compress.optimizers import Formula, Now
from hvd_compress.optimizers.base import documented

from ..binding import VariableBinding
from ..optimizer import variables_of
from ..slots import native

#: what Keras calls options of formulas; ``betas`` are two
NAMES = {"lr": "learning_rate", "betas": "beta_1 and beta_2", "eps": "epsilon"}
_BETAS = ("beta_1", "beta_2")
_OPTIONS = """\
Options have Keras's names, as in its own optimizers: ``learning_rate`` is lr, a number or a
schedule, ``beta_1`` and ``beta_2`` are betas, ``epsilon`` is eps.  ``name`` and ``options``, such
as ``clipnorm``, are those of every optimizer of Keras."""


class KerasFormulaOptimizer(keras.optimizers.Optimizer):
    """Steps by a formula, one variable after the other.

    Options are attributes: ``learning_rate``, ``beta_1``, ``beta_2`` and ``epsilon`` by Keras's
    names, all others by those of the formula.  ``exclude_from_weight_decay`` works as ever.  The
    number of updates is counted for all variables together, and a state that the formula needs
    later has its place from the beginning.

    Args:
        options: those of the formula, ``name``, and those of every Keras optimizer.
    """

    formula: ClassVar[type[Formula]]

    _variance_steps: Any

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "formula" not in vars(cls):
            return
        cls.__signature__ = _signature(cls)
        cls.__doc__ = f"{documented(cls)}\n\n{_OPTIONS}"
        keras.saving.register_keras_serializable(package="hvd_compress")(cls)
        # The class of a distributed optimizer is made from it, and is saved under its bare name.
        keras.saving.get_custom_objects()[cls.__name__] = cls

    def __init__(self, *options: Any, **named: Any) -> None:
        bound = _signature(type(self)).bind(*options, **named)
        bound.apply_defaults()
        given = dict(bound.arguments)
        rate, decay, more = (given.pop(n) for n in ("learning_rate", "weight_decay", "options"))
        super().__init__(rate, weight_decay=decay, name=given.pop("name"), **more)
        for name, value in given.items():
            setattr(self, name, list(value) if isinstance(value, tuple) else value)
        self._own = list(given)
        self._now: Now | None = None
        self._formula(0.0, self.weight_decay or 0.0).check(NAMES)

    def get_config(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in self._own}
        lists = {k: list(v) if isinstance(v, list | tuple) else v for k, v in own.items()}
        return super().get_config() | lists

    def build(self, variables: Sequence[Any]) -> None:
        if self.built:
            return
        super().build(variables)
        if "variance_step" in self.formula.counts:
            self._variance_steps = self.add_variable((), "zeros", "int64", name="variance_steps")
        arrays = [slot.name for slot in self.formula.slots if slot.kind == "array"]
        slots = dict(zip(arrays, self.add_optimizer_variables(variables, arrays), strict=True))
        for slot in self.formula.slots:
            if slot.kind != "array":
                start = keras.initializers.Constant(slot.start)
                slots[slot.name] = [
                    self.add_variable((), start, "float64", name=f"{slot.name}_{i}")
                    for i in range(len(variables))
                ]
        self.slots = slots

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Take one step along the gradients."""
        grads = list(grads)
        known = variables_of(self, grads, trainable_variables) if grads else []
        if len(known) == len(grads):
            self._now = self._now_of(grads, known)
        given = None if trainable_variables is None else known
        super().apply(grads, given)  # which refuses all else
        self._now = None  # it belongs to the graph

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        use = self.weight_decay and self._use_weight_decay(variable)
        formula = self._formula(
            tf.cast(learning_rate, tf.float64), self.weight_decay if use else 0.0
        )
        w, state = self._entries(variable)
        gradient = tf.cast(tf.convert_to_tensor(gradient), w.dtype)
        self._keep(variable, *formula.step(w, gradient, state, self._now_for(variable)))

    def _now_of(self, grads: Sequence[Any], variables: Sequence[Any]) -> Now:
        return Now(tf.cast(self.iterations + 1, tf.float64))

    def _now_for(self, variable: Any) -> Now:
        assert self._now is not None
        return self._now

    def _formula(self, rate: Any, decay: float) -> Any:
        names = (field.name for field in dataclasses.fields(self.formula))
        options = {name: getattr(self, NAMES.get(name, name), None) for name in names}
        if "betas" in options:
            options["betas"] = tuple(getattr(self, name) for name in _BETAS)
        if "weight_decay" in options:
            options["weight_decay"] = decay
        return self.formula.unchecked(**options | {"lr": rate})

    def _entries(self, variable: Any) -> tuple[Any, dict[str, Any]]:
        place = self._get_variable_index(variable)
        state = {name: native(all_[place]).value() for name, all_ in self.slots.items()}
        return native(variable).value(), state

    def _keep(self, variable: Any, w: Any, state: Mapping[str, Any]) -> None:
        place = self._get_variable_index(variable)
        for name, x in state.items():
            self.slots[name][place].assign(x)
        variable.assign(w)

    def _apply_weight_decay(self, variables: Any) -> None:
        """Do nothing: decay is a part of the formula."""


class KerasPartnerOptimizer(KerasFormulaOptimizer):
    """An optimizer that knows what its compression returns instead of gradients."""

    def __init__(self, *options: Any, **named: Any) -> None:
        super().__init__(*options, **named)
        self._binding: VariableBinding | None = None
        self._places: dict[int, int] = {}

    def compressor(self, **options: Any) -> Any:
        """Return the compression that belongs to this optimizer; ``options`` are those that the
        optimizer does not determine."""
        return self._formula(0.0, 0.0).compressor(**options)

    def compression_options(self) -> dict[str, Any]:
        """Return the options of the compression that the optimizer determines."""
        return self._formula(0.0, 0.0).compression_options()

    def follow(self, binding: VariableBinding, places: Mapping[int, int]) -> None:
        """Take ``binding`` for the one that averages.  Its results may be momenta instead of
        gradients; ``places`` are its slots by the ids of variables.

        Raises:
            ConfigError: an option would be applied to these.
        """
        for option in ("clipnorm", "clipvalue", "global_clipnorm"):
            if getattr(self, option) is not None:
                raise ConfigError(
                    f"{option}={getattr(self, option)} would change what "
                    f"{binding.method.name!r} returns, which are no gradients: drop it, or do the "
                    "same to the gradients before optimizer.apply"
                )
        self._binding, self._places = binding, dict(places)

    def _is_shared(self, variable: Any) -> bool:
        """Return whether the compression averages what belongs to a variable."""
        return id(native(variable)) in self._places


def _signature(cls: Any) -> inspect.Signature:
    """Return the parameters of an optimizer: options of its formula by Keras's names, and more."""
    found = []
    for parameter in inspect.signature(cls.formula).parameters.values():
        if parameter.name == "betas":
            pairs = zip(_BETAS, parameter.default, strict=True)
            found += [parameter.replace(name=n, default=x, annotation=float) for n, x in pairs]
        elif parameter.name == "weight_decay":
            found.append(parameter.replace(default=None))
        else:
            found.append(parameter.replace(name=NAMES.get(parameter.name, parameter.name)))
    if all(parameter.name != "weight_decay" for parameter in found):
        found.append(
            inspect.Parameter("weight_decay", inspect.Parameter.KEYWORD_ONLY, default=None)
        )
    names = [parameter.name for parameter in found]
    if "epsilon" in names:  # what Keras's own optimizers have by place
        after = names.index("epsilon") + 1
        own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in found[after:]]
        found[after:] = own
    name = cls.formula.__module__.rpartition(".")[2]
    found.append(inspect.Parameter("name", inspect.Parameter.KEYWORD_ONLY, default=name))
    found.append(inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(found)
