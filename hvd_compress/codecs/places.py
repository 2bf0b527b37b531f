"""The place where codes are made and read: on the host, or where an array is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvd_compress.backends import Output, backend_of
from hvd_compress.codecs.base import Array, Codec, Coder
from hvd_compress.kernels import loops_of


def coded(
    codec: Codec,
    function: Callable[..., Sequence[Any]],
    inputs: Sequence[Any],
    outputs: Sequence[Output],
    like: Array,
) -> list[Array]:
    """``function`` of a :class:`~hvd_compress.codecs.base.Coder` and of ``inputs``: where there are
    loops of ``codec`` for the memory that ``like`` is in, of arrays as they are; else on the host,
    as in ``Backend.on_host``.

    Bytes (uint8) are messages: ``function`` takes and returns them as NumPy arrays, and they stay
    in host memory.
    """
    xp = backend_of(like)
    loops = loops_of(like)
    coder: Coder | None = None if loops is None else loops.placed(codec, like)
    if coder is None:
        return xp.on_host(functools.partial(function, codec), inputs, outputs, like)
    arrays = [_bytes_to_numpy(x) for x in inputs]
    results = function(coder, *arrays)
    return [xp.from_numpy(x, None) if isinstance(x, np.ndarray) else x for x in results]


def _bytes_to_numpy(x: Any) -> Any:
    if isinstance(x, int):
        return x
    xp = backend_of(x)
    return xp.to_numpy(x) if xp.dtype(x) == "uint8" else x
