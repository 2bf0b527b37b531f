"""Calls of users: ``hvd.LocalSGD(optimizer, sync_every=8)`` and so on, in every framework, and the
door that is the same for all methods, ``DistributedOptimizer(optimizer, method=...)``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from hvd_compress.errors import ConfigError
from hvd_compress.systems import rounds
from hvd_compress.systems.base import TrainingMethod, methods_in

#: the training methods with a factory of their name
METHODS = methods_in(vars(rounds))
#: what to do instead of setting an option of ``DistributedOptimizer``
_INSTEAD = {
    "compression": "codecs are options of ChocoSGD and LEAD, and compression= one of LocalSGD",
    "backward_passes_per_step": "gradients add up until step(), however many passes there are",
}


def factories_of(
    local_steps: Callable[..., Any], module: str, own: Mapping[str, Any], doc: str
) -> dict[str, Callable[..., Any]]:
    """Return ``local_steps`` and a function for each method, by name.  Such a function calls
    ``local_steps(optimizer, method)``; without an optimizer it returns the method, for options that
    take one.

    Args:
        module: that they belong to.
        own: the options of ``local_steps`` itself with their defaults.
        doc: says what the functions return and what these options are.
    """
    local_steps.__module__, local_steps.__qualname__ = module, "local_steps"
    made = {name: _factory(cls, local_steps, module, own, doc) for name, cls in METHODS.items()}
    return {"local_steps": local_steps, **made}


def distribute_by_method(
    local_steps: Callable[..., Any], signature: inspect.Signature, options: Mapping[str, Any]
) -> Any:
    """Return what ``local_steps(optimizer, method)`` does, with those of the options of
    ``DistributedOptimizer`` that it has.

    Args:
        signature: that of ``DistributedOptimizer``, with the defaults.

    Raises:
        ConfigError: another one, which is about gradients, is not left out.
    """
    known = inspect.signature(local_steps).parameters
    for option, value in options.items():
        if option in known:
            continue
        default = signature.parameters[option].default
        if value is not default and value != default:
            instead = f": {_INSTEAD[option]}" if option in _INSTEAD else ""
            raise ConfigError(
                f"{option}={value!r:.60} and method={options['method']!r} cannot be combined, "
                f"since a training method sends no gradients; leave {option} out{instead}"
            )
    return local_steps(**{name: value for name, value in options.items() if name in known})


def _factory(
    cls: type[TrainingMethod],
    local_steps: Callable[..., Any],
    module: str,
    own: Mapping[str, Any],
    doc: str,
) -> Callable[..., Any]:
    def make(optimizer: Any = None, *options: Any, **more: Any) -> Any:
        chosen = {name: more.pop(name, default) for name, default in own.items()}
        method = cls(*options, **more)
        if optimizer is not None:
            return local_steps(optimizer, method, **chosen)
        if foreign := [name for name, value in chosen.items() if value is not own[name]]:
            raise ConfigError(
                f"{foreign[0]}= needs an optimizer: write hvd.{cls.__name__}(optimizer, ...), or "
                f"pass it where method=hvd.{cls.__name__}(...) goes"
            )
        return method

    kinds = inspect.Parameter
    first = kinds("optimizer", kinds.POSITIONAL_OR_KEYWORD, default=None)
    options = inspect.signature(cls).parameters.values()
    last = [kinds(name, kinds.KEYWORD_ONLY, default=value) for name, value in own.items()]
    make.__signature__ = inspect.Signature([first, *options, *last])  # type: ignore[attr-defined]
    make.__name__ = make.__qualname__ = cls.__name__
    make.__module__ = module
    make.__doc__ = f"{inspect.getdoc(cls)}\n\n{inspect.cleandoc(doc)}"
    make.training_method = cls  # type: ignore[attr-defined]  # method=hvd.LocalSGD means the class
    return make
