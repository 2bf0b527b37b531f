"""A check that all ranks are about to do the same step.

Ranks that differ in the method, its options, the step or the tensors wait for each other for ever,
or, worse, go on with weights that differ.  So at the beginning of every step they compare a digest
of everything that must be equal: 16 bytes, in flight while gradients are computed.  If digests
differ, ranks exchange the full text, and every rank raises an error that shows all differences.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Exchange, Outcome
from hvd_compress.errors import MismatchError
from hvd_compress.requests import Gather, Max

#: values that must be equal, by name: "method", "step" ...; lists are compared entry by entry
Terms = Mapping[str, "str | Sequence[str]"]

#: the number of entries of a list, and of letters of an entry, that a message shows
_ENTRIES, _LETTERS = 3, 400


#: why a rank may be somewhere else than the others, and what to do
UNEVEN = (
    "one had fewer batches than others, left the loop, or loaded another checkpoint. Give all "
    "ranks equally many batches, with DistributedSampler and drop_last=True, or steps_per_epoch in "
    "Keras; or train without a compression over Horovod and call hvd.join()"
)
_LOAD = (
    "Load a checkpoint on all ranks; or load it on one and broadcast it, in PyTorch by "
    "broadcast_optimizer_state(), in Keras by BroadcastGlobalVariablesCallback"
)
_SAME = f"Make the optimizer with the same model and options on all ranks. {_LOAD}"
#: terms by which ranks differ that are not equally far
_PROGRESS = {"step", "epoch"}


def agreement(terms: Terms, like: Array) -> Exchange:
    """Compare ``terms`` over the ranks.

    Args:
        like: an array; the messages are made by its backend, on its device.

    Raises:
        MismatchError: on every rank, if they differ.
    """
    xp, text = backend_of(like), encode(terms)
    own = digest(text)
    # The largest digest and the smallest: both are this rank's only if all are.
    mine = np.array([own, -own])
    most = yield Max(xp.from_numpy(mine, like))
    if (xp.to_numpy(most) != mine).any():
        payload = xp.from_numpy(np.frombuffer(text, np.uint8).copy(), like)
        everyone = yield Gather(payload)
        raise MismatchError(differences([xp.to_numpy(theirs).tobytes() for theirs in everyone]))
    return Outcome(most, most, {})


def encode(terms: Terms) -> bytes:
    return json.dumps(dict(terms)).encode()


def digest(text: bytes) -> int:
    """63 bits, so that a signed integer holds it and its opposite."""
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


def listed(shapes: Iterable[tuple[str, Sequence[int]]]) -> list[str]:
    """Tensors as an entry of ``Terms``: names with shapes."""
    return [f"{name} {list(shape)}" for name, shape in shapes]


def differences(everyone: Sequence[bytes]) -> str:
    """The message that shows the encoded terms of all ranks, as far as they differ."""
    terms = [json.loads(text) for text in everyone]
    lines, differing = [], set()
    for what in dict.fromkeys(key for own in terms for key in own):
        values = [own.get(what, "nothing") for own in terms]
        if all(value == values[0] for value in values):
            continue
        differing.add(what)
        if all(isinstance(value, list) for value in values):
            values = _unequal_entries(values)
        lines.append(f"  {what}")
        for value in dict.fromkeys(map(_shortened, values)):
            ranks = [str(r) for r, theirs in enumerate(values) if _shortened(theirs) == value]
            lines.append(f"    rank {', '.join(ranks)}: {value}")
    advice = _SAME
    if differing <= _PROGRESS:
        advice = f"Not all ranks are equally far: {UNEVEN}. {_LOAD}"
    return "\n".join(["the ranks differ in what must be the same:", *lines, advice])


def _unequal_entries(lists: list[list[str]]) -> list[str]:
    longest = max(map(len, lists))
    filled = [[*entries, *[None] * (longest - len(entries))] for entries in lists]
    places = [i for i, column in enumerate(zip(*filled, strict=True)) if len(set(column)) > 1]
    shown = [", ".join(entries[i] or "no more" for i in places[:_ENTRIES]) for entries in filled]
    rest = f" and {len(places) - _ENTRIES} more that differ" if len(places) > _ENTRIES else ""
    return [f"{len(own)}: {text}{rest}" for own, text in zip(lists, shown, strict=True)]


def _shortened(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LETTERS else text[:_LETTERS] + " ..."
