"""What users call: ``hvd.LocalSGD(optimizer, sync_every=8)`` and so on, in every framework."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from hvd_compress.errors import ConfigError
from hvd_compress.systems.base import TrainingMethod
from hvd_compress.systems.rounds.diloco import DiLoCo
from hvd_compress.systems.rounds.easgd import EAMSGD, EASGD
from hvd_compress.systems.rounds.leader_sgd import LeaderSGD
from hvd_compress.systems.rounds.local_sgd import LocalSGD
from hvd_compress.systems.rounds.slowmo import SlowMo

#: the training methods with a factory of their name
METHODS: tuple[type[TrainingMethod], ...] = (LocalSGD, SlowMo, DiLoCo, LeaderSGD, EASGD, EAMSGD)


def factories_of_methods(
    local_steps: Callable[..., Any], module: str, own: Mapping[str, Any], doc: str
) -> dict[str, Callable[..., Any]]:
    """Return a function for each method, which calls ``local_steps(optimizer, method)``, or returns
    the method, for options that take one, if it gets no optimizer.

    Args:
        module: that they belong to.
        own: the options of ``local_steps`` itself with their defaults.
        doc: says what the functions return and what these options are.
    """
    return {cls.__name__: _factory(cls, local_steps, module, own, doc) for cls in METHODS}


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
        if foreign := [name for name, value in chosen.items() if value != own[name]]:
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
    make.__doc__ = (cls.__doc__ or "") + doc
    make.training_method = cls  # type: ignore[attr-defined]  # method=hvd.LocalSGD means the class
    return make
