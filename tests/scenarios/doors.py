"""Public calls take values of wrong kinds: each ends in an error of the package, in one of Python's
own about the call, or in one of the library below."""

from __future__ import annotations

import inspect
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hvd_compress.errors import CompressionError

WRONG: tuple[Any, ...] = (
    *(None, "wrong", -1, 1.5, float("nan"), True, object(), [], [1], [None], [[]], {}, {"a": 1}),
    *(b"x", int, lambda: None, np.ones(2)),
)
#: what inner frames raise of what they were not made for
BARE = (KeyError, TypeError, IndexError, ValueError, AttributeError, RuntimeError)
_PACKAGES = ("hvd_compress", "hvd_compress.torch", "hvd_compress.tensorflow")


def _is_ours(frame: traceback.FrameSummary) -> bool:
    known = (sys.modules[name] for name in _PACKAGES if name in sys.modules)
    return any(frame.filename.startswith(str(Path(m.__file__ or "").parent)) for m in known)


def problem(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except CompressionError:
        return None
    except BARE as error:
        innermost = traceback.extract_tb(error.__traceback__)[-1]
        if not _is_ours(innermost):
            return None  # the call does not bind, or the library says what is wrong
        return f"{type(error).__name__}: {error} ({innermost.filename}:{innermost.lineno})"
    return None


def problems(
    label: str,
    function_of: Callable[[], Callable[..., Any]],
    right: Mapping[str, Callable[[], Any]],
    wrong_values: Iterable[Any] = WRONG,
) -> list[str]:
    """Return the errors that each wrong value for an argument ends in, beside right ones for those
    that the call needs."""
    found = []
    given = [
        p
        for p in inspect.signature(function_of()).parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    needed = {p.name for p in given if p.default is p.empty}
    for p in given:
        if needed - {p.name} - right.keys():
            continue
        for wrong in wrong_values:
            options = {name: right[name]() for name in needed - {p.name}} | {p.name: wrong}
            function = function_of()
            if said := problem(lambda f=function, o=options: f(**o)):
                found.append(f"{label}({p.name}={wrong!r}): {said}")
    return found


def quietly(collect: Callable[[], list[str]]) -> None:
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = collect()
    finally:
        logging.disable(level)
    assert not found, "\n".join(found)
