"""Options as frozen dataclasses that can be stored as JSON.

Methods, schedules and the building blocks of chains are all :class:`Configurable`:
``thing == from_config(json.loads(json.dumps(thing.to_config())))``.
"""

from __future__ import annotations

import abc
import dataclasses
import difflib
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeGuard

from hvd_compress.errors import ConfigError

_REGISTRY: dict[str, dict[str, type[Configurable]]] = {}


class _NamedMeta(abc.ABCMeta):
    """``ABCMeta`` under which a class may have the keyword ``name``: before Python 3.11 that is a
    parameter of its own ``__new__``, and ``class DGC(Compressor, name="dgc")`` a ``TypeError``."""

    def __new__(
        mcls, class_name: str, bases: tuple[type, ...], body: dict[str, Any], /, **options: Any
    ) -> _NamedMeta:
        options = {"named" if key == "name" else key: value for key, value in options.items()}
        return super().__new__(mcls, class_name, bases, body, **options)


class Configurable(metaclass=_NamedMeta):
    """A frozen dataclass with a name that is unique among those of its kind.

    ``class DGC(Compressor, name="dgc")`` is all it takes to register; so does a class of another
    package.
    """

    kind: ClassVar[str]
    name: ClassVar[str]

    def __init_subclass__(cls, *, kind: str | None = None, named: str | None = None, **more: Any):
        super().__init_subclass__(**more)
        if kind is not None:
            cls.kind = kind
        if named is not None:
            cls.name = named
            other = _REGISTRY.setdefault(cls.kind, {}).get(named)
            # dataclass(slots=True) and module reloads make the same class again; others clash.
            if other is not None and other.__qualname__ != cls.__qualname__:
                raise ConfigError(f"the {cls.kind} name {named!r} is taken by {other.__qualname__}")
            _REGISTRY[cls.kind][named] = cls

    def __post_init__(self) -> None:
        """Check and convert the options that say how, in their order; see :func:`checked` and
        :func:`converted`.  Subclasses that override this method call it, too."""
        for field in _fields(self):
            if (check := field.metadata.get(_CHECK)) is not None:
                check(field.name, getattr(self, field.name))
            if (converter := field.metadata.get(_CONVERTER)) is not None:
                object.__setattr__(self, field.name, converter(getattr(self, field.name)))

    @property
    def parts(self) -> list[Configurable]:
        """The options that are themselves configurable, and those in tuples."""
        return [p for field in _fields(self) for p in _configurables(getattr(self, field.name))]

    # Traits come from the parts, so nobody forwards them by hand; a part that has one says so.

    @property
    def working_parts(self) -> list[Configurable]:
        """The parts that the following traits come from."""
        return self.parts

    @functools.cached_property
    def needs_epoch(self) -> bool:
        """Whether the user has to announce epochs: an option, at any depth, is a schedule by
        epoch."""
        return any(part.needs_epoch for part in self.parts)

    @functools.cached_property
    def homogeneous(self) -> bool:
        """Whether twice the gradient gives twice the result, so that no option is in units of the
        gradient.  If nothing is kept for later either, loss scaling may be undone after the
        exchange."""
        return all(part.homogeneous for part in self.working_parts)

    @functools.cached_property
    def takes_momentum(self) -> bool:
        """Whether the optimizer's momentum and weight decay are applied here, and not by the
        optimizer."""
        return any(part.takes_momentum for part in self.working_parts)

    @functools.cached_property
    def averages_momentum(self) -> bool:
        """Whether this momentum is a moving average, in units of a gradient.  That of SGD adds up
        to 1 / (1 - momentum) times as much; weight decay has to be scaled accordingly."""
        return any(part.averages_momentum for part in self.working_parts)

    @functools.cached_property
    def needs_gradient_norm(self) -> bool:
        """Whether ``context.gradient_norm`` is used, the norm of the whole gradient, which is known
        at the end of backward."""
        return any(part.needs_gradient_norm for part in self.working_parts)

    @functools.cached_property
    def is_coarse(self) -> bool:
        """Whether a step sends few elements of a gradient, or a bit of each.  The rest arrives in
        bursts, or all elements are as large as each other."""
        return any(part.is_coarse for part in self.working_parts)

    def to_config(self) -> dict[str, Any]:
        """Return a dict that can be stored as JSON; see :func:`from_config`."""
        options = {field.name: _plain(getattr(self, field.name)) for field in _fields(self)}
        return {self.kind: self.name} | options


#: the keys of a check and of a converter in the metadata of a field
_CHECK, _CONVERTER = "hvd_compress check", "hvd_compress converter"

#: raises ``ConfigError`` unless an option, by its name, may have a value
Check = Callable[[str, Any], None]


def checked(check: Check, default: Any = dataclasses.MISSING) -> Any:
    """Return an option, a field of a dataclass, whose values are checked when one is made."""
    return dataclasses.field(default=default, metadata={_CHECK: check})


def choice(*choices: Any, default: Any = dataclasses.MISSING) -> Any:
    """Return an option that is one of ``choices``, and by default the first of them::

    via: str = choice("alltoall", "allgather")
    """
    check = functools.partial(check_choice, choices=choices)
    return checked(check, choices[0] if default is dataclasses.MISSING else default)


def numbers(
    words: str, fits: Callable[[Any], bool], *, whole: bool = False, optional: bool = False
) -> Check:
    """Return a check of numbers: ``words`` say in the error what ``fits``, ``None`` beside it if
    ``optional``."""

    def check(option: str, value: Any) -> None:
        known = is_whole(value) if whole else is_number(value)
        if not (known and fits(value)) and not (optional and value is None):
            raise ConfigError(f"{option} must be {words}; got {value!r}")

    return check


def converted(function: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the metadata of an option that is stored as ``function(value)``, for instance a
    schedule where the user may write a number::

        start: Start = dataclasses.field(default=True, metadata=converted(as_start))

    Args:
        function: raises ``ConfigError`` for values that cannot be.
    """
    return {_CONVERTER: function}


def _fields(thing: Configurable) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(thing) if dataclasses.is_dataclass(thing) else ()


def _configurables(value: Any) -> list[Configurable]:
    if isinstance(value, tuple):
        return [part for item in value for part in _configurables(item)]
    return [value] if isinstance(value, Configurable) else []


def _plain(value: Any) -> Any:
    if isinstance(value, Configurable):
        return value.to_config()
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def names(kind: str) -> list[str]:
    """Return what is registered, for instance ``names("method")``."""
    return sorted(_REGISTRY.get(kind, {}))


def lookup(kind: str, name: str) -> Any:
    """Return the class of that name; the error lists all names."""
    check_choice(kind, name, tuple(names(kind)))
    return _REGISTRY[kind][name]


def from_config(config: Any) -> Any:
    """Return the method, block or schedule that ``to_config()`` made a dict of.

    Args:
        config: the dict, which may have been stored as JSON; lists and plain values stay such.

    >>> config = TopK(density=0.01).to_config()
    >>> config["method"], from_config(config) == TopK(density=0.01)
    ('topk', True)
    """
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


def build(
    cls: Any, options: dict[str, Any], name: str | None = None, more: Sequence[str] = ()
) -> Any:
    """Return ``cls(**options)``; the error lists the options there are.

    Args:
        cls: a dataclass.
        options: its fields.
        name: of who takes them, if that is not ``cls``.
        more: options of theirs that are no fields.
    """
    known = [f.name for f in dataclasses.fields(cls)]
    for option in options:
        if option not in known:
            listed = [*more, *known]
            raise ConfigError(
                f"{name or cls.name} has no option {option!r}; it has "
                f"{', '.join(listed) or 'none'}" + _meant(option, listed)
            )
    return cls(**options)


def is_whole(value: Any) -> TypeGuard[int]:
    """Return whether it is an ``int``, but not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether it is an ``int`` or ``float``, but not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_one_of(value: Any, choices: Iterable[Any]) -> bool:
    """Return whether a value equals one of the choices; arrays, which have no truth, do not."""
    try:
        return value in choices
    except (TypeError, ValueError, RuntimeError):
        return False


def as_tuple(option: str) -> Callable[[Any], tuple[Any, ...]]:
    """Return a converter of an option that is a list, for :func:`converted`."""

    def convert(value: Any) -> tuple[Any, ...]:
        try:
            if not isinstance(value, str):
                return tuple(value)
        except TypeError:  # arrays without dimensions say only then that they have no elements
            pass
        raise ConfigError(f"{option} must be a list; got {value!r}")

    return convert


def number_from_environment(variable: str, default: float) -> float:
    """Return the number that a variable of the environment says, or ``default`` without it."""
    text = os.environ.get(variable)
    if text is None:
        return default
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{variable}={text!r} is not a number") from None


def time_out(given: float | None = None) -> float:
    """Return the seconds that a rank waits for others: ``given``, or those of the environment."""
    seconds = number_from_environment("HVD_COMPRESS_TIMEOUT", 600.0) if given is None else given
    if not seconds > 0:
        raise ConfigError(f"timeout={seconds}: seconds, more than 0")
    return seconds


def check_seed(seed: Any) -> None:
    """Raise unless ``seed`` is a whole number of 64 bits."""
    if not is_whole(seed) or not -(2**63) <= seed < 2**63:
        raise ConfigError(f"seed must be a whole number, for instance seed=1; got {seed!r}")


def check_fraction(option: str, value: Any) -> None:
    """Raise unless ``0 < value <= 1``."""
    if not is_number(value) or not 0 < value <= 1:
        raise ConfigError(f"{option} must be in (0, 1], for instance {option}=0.001; got {value!r}")


def check_bool(option: str, value: Any) -> None:
    """Raise unless ``value`` is True or False: a number equal to one is another text."""
    if not isinstance(value, bool):
        raise ConfigError(f"{option} must be True or False; got {value!r}")


def check_whole(option: str, value: Any, least: int) -> None:
    """Raise ``ConfigError`` unless ``value`` is a whole number, ``least`` or more."""
    if not is_whole(value) or value < least:
        raise ConfigError(f"{option} must be a whole number from {least}; got {value!r}")


def check_between(option: str, value: Any, low: float, high: float = float("inf")) -> None:
    """Raise ``ConfigError`` unless ``low <= value <= high``."""
    if not is_number(value) or not low <= value <= high:
        span = f"{low} or more" if high == float("inf") else f"from {low} to {high}"
        raise ConfigError(f"{option} must be {span}; got {value!r}")


def no_process_set(value: Any) -> ConfigError:
    """Return what to raise of a value for the option ``process_set`` that is no set of ranks."""
    return ConfigError(
        f"process_set={value!r}: pass hvd.global_process_set, or what hvd.add_process_set(...) "
        "returns"
    )


def check_process_set(value: Any) -> None:
    """Raise ``ConfigError`` unless this is a set of ranks, of Horovod or of this package."""
    if not callable(getattr(value, "included", None)):
        raise no_process_set(value)


def check_choice(option: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise unless ``value`` is one of ``choices``."""
    if not is_one_of(value, choices):
        raise ConfigError(
            f"{option} must be one of {', '.join(map(repr, choices))}; got {value!r}"
            + _meant(value, choices)
        )


def _meant(value: Any, choices: Sequence[Any]) -> str:
    """The end of a message about a text that is almost one of the choices."""
    texts = [choice for choice in choices if isinstance(choice, str)]
    found = difflib.get_close_matches(value, texts, 1) if isinstance(value, str) else ()
    return f"; did you mean {found[0]!r}?" if found else ""
