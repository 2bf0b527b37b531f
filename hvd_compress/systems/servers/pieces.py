"""How parameters are divided among servers: evenly by bytes, between rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hvd_compress.systems.base import Arrays


class ServerPiece(NamedTuple):
    """Rows of a parameter, which a server owns.

    Attributes:
        name: of the piece; that of the parameter if it has all its rows.
        tensor: the name of the parameter.
        start, stop: the rows along the first dimension, the last one excluded.

    >>> pieces_of({"w": np.zeros((4, 2))}, servers=2)[1]
    [ServerPiece(name='w[2:4]', tensor='w', start=2, stop=4)]
    """

    name: str
    tensor: str
    start: int
    stop: int


def pieces_of(arrays: Mapping[str, np.ndarray], servers: int) -> list[list[ServerPiece]]:
    """Return the pieces of each server: consecutive ones, of as many bytes as rows allow.

    Rows are cut along the first dimension, so matrices stay matrices.  Arrays without elements
    belong to nobody.

    Args:
        arrays: parameters by name, of any shapes and dtypes.
        servers: the number of servers, among which the bytes are divided.

    >>> x = {"w": np.zeros((4, 2)), "b": np.zeros(2)}
    >>> [[piece.name for piece in own] for own in pieces_of(x, 2)]
    [['w[0:2]'], ['w[2:4]', 'b']]
    """
    total = sum(x.nbytes for x in arrays.values())
    found: list[list[ServerPiece]] = [[] for _ in range(servers)]
    offset = 0
    for tensor, x in arrays.items():
        rows = len(x) if x.ndim else 1
        for server, own in enumerate(found):
            # The numbers of rows before the server's first and its last byte.
            start, stop = (
                min(rows, max(0, round((total * edge / servers - offset) * rows / x.nbytes)))
                if x.nbytes
                else 0
                for edge in (server, server + 1)
            )
            if start < stop:
                name = tensor if (start, stop) == (0, rows) else f"{tensor}[{start}:{stop}]"
                own.append(ServerPiece(name, tensor, start, stop))
        offset += x.nbytes
    return found


def taken_from(arrays: Mapping[str, np.ndarray | None], pieces: Sequence[ServerPiece]) -> Arrays:
    """Return the ``pieces`` of ``arrays`` that are there, and not ``None``, by the name of the
    piece: views."""
    found = {}
    for name, tensor, start, stop in pieces:
        if (whole := arrays.get(tensor)) is not None:
            found[name] = whole[start:stop] if whole.ndim else whole
    return found


def assembled(
    start: Mapping[str, np.ndarray],
    found: Sequence[Mapping[str, np.ndarray]],
    pieces: Sequence[Sequence[ServerPiece]],
) -> Arrays:
    """Undo :func:`taken_from`: return copies of the whole arrays ``start`` with the pieces that
    were ``found`` on each server in their places."""
    whole = {name: x.copy() for name, x in start.items()}
    for own, theirs in zip(found, pieces, strict=True):
        for name, tensor, first, last in theirs:
            rows = slice(first, last) if whole[tensor].ndim else ...
            whole[tensor][rows] = own[name]
    return whole
