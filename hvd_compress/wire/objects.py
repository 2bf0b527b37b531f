"""Objects as bytes.  If one cannot be pickled, the reason travels instead: every rank raises the
same error, and none waits for bytes that do not come."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

from hvd_compress.errors import UnsupportedError


class _Refusal(NamedTuple):
    reason: str


def pickled(obj: Any) -> bytes:
    """Return an object as bytes for :func:`unpickled`."""
    try:
        return pickle.dumps(obj)
    except Exception as error:
        return pickle.dumps(_Refusal(f"{_culprit(obj, 'object')}: {error}"))


def unpickled(raw: bytes, sender: str) -> Any:
    """Return the object of which these are the bytes.

    Raises:
        UnsupportedError: the sender could not pickle it.
    """
    obj = pickle.loads(raw)
    if isinstance(obj, _Refusal):
        raise UnsupportedError(f"{sender} cannot send {obj.reason}. Leave it out")
    return obj


def _culprit(obj: Any, name: str) -> str:
    """Return the innermost entry that cannot be pickled, such as object['step'][0]."""
    entries: Any = obj.items() if isinstance(obj, dict) else ()
    if isinstance(obj, list | tuple):
        entries = enumerate(obj)
    for key, entry in entries:
        try:
            pickle.dumps(entry)
        except Exception:
            return _culprit(entry, f"{name}[{key!r}]")
    return f"{name}, a {type(obj).__name__}"
