"""Functions for libraries that keep them for ever.  TensorFlow keeps every Python function that a
graph has called until the program ends, and with it all that the function holds."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from hvd_compress.errors import UnboundError


def weakly(owner: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with ``owner`` as its first argument, which it does not keep alive."""
    reference = weakref.ref(owner)

    @functools.wraps(function)
    def call(*inputs: Any) -> Any:
        owner = reference()
        if owner is None:
            raise UnboundError(
                "this graph belongs to an optimizer that has been deleted, or to another number of "
                "ranks: make its tf.function again"
            )
        return function(owner, *inputs)

    return call
