"""Methods as texts: "dgc:density=0.01", and what else users may pass as ``compression=``."""

from __future__ import annotations

import ast
import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from hvd_compress.base import Compressor
from hvd_compress.config import build, check_choice, lookup, names
from hvd_compress.errors import ConfigError

#: names a method where a script does not: ``HVD_COMPRESSION=dgc:density=0.01 horovodrun ...``
VARIABLE = "HVD_COMPRESSION"


def from_environment() -> Compressor | None:
    """Return the method that ``HVD_COMPRESSION`` names, or ``None`` if it is not set."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return None
    try:
        return as_compressor(text)
    except ConfigError as error:
        raise ConfigError(f"the environment has {VARIABLE}={text}: {error}") from None


def method_names() -> list[str]:
    """Return the names of the methods that a text can name: those not made of others, nor chosen
    among others.

    >>> [name for name in method_names() if name.startswith("one")]
    ['onebit', 'onebit_adam']
    """
    classes = {name: lookup("method", name) for name in names("method")}
    return [
        name
        for name, cls in classes.items()
        if not _required(cls) and not getattr(cls, "is_chosen_later", False)
    ]


def named(name: str) -> Any:
    """Return the class of a method by its name; the error lists the names that a text can have."""
    name = name.strip().lower()
    if name not in names("method"):
        check_choice("method", name, tuple(method_names()))
    return lookup("method", name)


def _required(cls: Any) -> list[str]:
    """The options that have no default."""
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    missing = dataclasses.MISSING
    return [f.name for f in fields if f.default is missing and f.default_factory is missing]


def as_compressor(compression: Any) -> Compressor:
    """Return a method from an instance, a class (its defaults) or a text.

    Args:
        compression: such as ``DGC(density=0.01)``, ``DGC``, "dgc", "dgc:density=0.01"
            or a preset such as "dgc:compact".

    >>> from hvd_compress import DGC
    >>> as_compressor("efsignsgd:via=allgather")
    EFSignSGD(via='allgather')
    >>> as_compressor("dgc:compact") == DGC.compact()
    True
    """
    if isinstance(compression, Compressor):
        return compression
    if isinstance(compression, type) and issubclass(compression, Compressor):
        return compression()
    if isinstance(compression, str):
        name, _, text = compression.partition(":")
        method = named(name)
        if _required(method):
            raise ConfigError(f"a {name} cannot be written as a text: pass {name}(...)")
        options: dict[str, Any] = {}
        preset: Mapping[str, Any] = {}
        for part in filter(None, text.split(",")):
            key, equals, value = part.partition("=")
            if not equals and part.strip() in method.presets:
                preset = method.presets[part.strip()]
                continue
            if not equals:
                raise ConfigError(f"options in {compression!r} are written {name}:option=value")
            if key.strip() in options:
                raise ConfigError(f"{compression!r} has the option {key.strip()} twice")
            options[key.strip()] = _value(value)
        return build(method, {**preset, **options})
    raise ConfigError(
        f"{compression!r} is no compression method: pass DGC, DGC(density=0.01) or "
        "'dgc:density=0.01'"
    )


def as_fixed(compression: Any) -> Compressor:
    """Return a method as :func:`as_compressor` does, where nothing can change it later.

    Raises:
        ConfigError: it is one that is chosen in the first steps.
    """
    method = as_compressor(compression)
    if method.is_chosen_later:
        raise ConfigError(
            f"compression={method.name!r} is for hvd.DistributedOptimizer of PyTorch, DDPState and "
            "Reducer, which can change the method between steps. Here measure once, by `mpirun ... "
            "hvd-compress advise --measure`, and write the method that it names"
        )
    return method


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return {"true": True, "false": False, "none": None}.get(text.strip(), text.strip())
