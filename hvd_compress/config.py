"""Options as frozen dataclasses that travel as JSON.

Methods, schedules and the building blocks of chains are all :class:`Configurable`:
``thing == from_config(json.loads(json.dumps(thing.to_config())))``.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from typing import Any, ClassVar, TypeGuard

from hvd_compress.errors import ConfigError

_REGISTRY: dict[str, dict[str, type[Configurable]]] = {}


class Configurable:
    """A frozen dataclass with a name that is unique among those of its kind.

    ``class DGC(Compressor, name="dgc")`` is all it takes to register; so does a class of another
    package.
    """

    kind: ClassVar[str]
    name: ClassVar[str]

    def __init_subclass__(cls, *, kind: str | None = None, name: str | None = None, **more: Any):
        super().__init_subclass__(**more)
        if kind is not None:
            cls.kind = kind
        if name is not None:
            cls.name = name
            other = _REGISTRY.setdefault(cls.kind, {}).get(name)
            # dataclass(slots=True) and module reloads make the same class again; others clash.
            if other is not None and other.__qualname__ != cls.__qualname__:
                raise ConfigError(f"the {cls.kind} name {name!r} is taken by {other.__qualname__}")
            _REGISTRY[cls.kind][name] = cls

    def to_config(self) -> dict[str, Any]:
        """A dict of what JSON can carry."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return {self.kind: self.name} | {f.name: _plain(getattr(self, f.name)) for f in fields}


def _plain(value: Any) -> Any:
    if isinstance(value, Configurable):
        return value.to_config()
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def names(kind: str) -> list[str]:
    """What is registered, for instance ``names("method")``."""
    return sorted(_REGISTRY.get(kind, {}))


def lookup(kind: str, name: str) -> Any:
    """The class of that name, or an error that lists what there is."""
    check_choice(kind, name, tuple(names(kind)))
    return _REGISTRY[kind][name]


def from_config(config: Any) -> Any:
    """The inverse of :meth:`Configurable.to_config`, also for nested values."""
    if isinstance(config, list | tuple):
        return tuple(from_config(item) for item in config)
    if not isinstance(config, dict):
        return config
    options = dict(config)
    kind = next((kind for kind in _REGISTRY if kind in options), None)
    if kind is None:
        raise ConfigError(f"a configuration needs one of the keys {sorted(_REGISTRY)}: {config!r}")
    cls = lookup(kind, options.pop(kind))
    return build(cls, {key: from_config(value) for key, value in options.items()})


def build(cls: Any, options: dict[str, Any]) -> Any:
    """``cls(**options)``, with an error that lists the options there are."""
    known = [f.name for f in dataclasses.fields(cls)]
    for option in options:
        if option not in known:
            raise ConfigError(
                f"{cls.name} has no option {option!r}; it has {', '.join(known) or 'none'}"
                + _meant(option, known)
            )
    return cls(**options)


def is_whole(value: Any) -> TypeGuard[int]:
    """An ``int``; ``True`` is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[float]:
    """An ``int`` or ``float``; ``True`` is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_seed(seed: Any) -> None:
    """Raise unless ``seed`` is a whole number that travels in 64 bits."""
    if not is_whole(seed) or not -(2**63) <= seed < 2**63:
        raise ConfigError(f"seed must be a whole number, for instance seed=1; got {seed!r}")


def check_fraction(option: str, value: Any) -> None:
    """Raise unless ``0 < value <= 1``."""
    if not is_number(value) or not 0 < value <= 1:
        raise ConfigError(f"{option} must be in (0, 1], for instance {option}=0.001; got {value!r}")


def check_choice(option: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ConfigError(
            f"{option} must be one of {', '.join(map(repr, choices))}; got {value!r}"
            + _meant(value, choices)
        )


def _meant(value: Any, choices: Sequence[Any]) -> str:
    """The end of a message about a text that is almost one of the choices."""
    texts = [choice for choice in choices if isinstance(choice, str)]
    found = difflib.get_close_matches(value, texts, 1) if isinstance(value, str) else ()
    return f"; did you mean {found[0]!r}?" if found else ""
