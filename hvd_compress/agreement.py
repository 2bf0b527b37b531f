"""A check that all ranks are about to do the same step.

Ranks that differ in the method, its options, the step or the tensors wait for each other for ever.
At worst they go on with weights that differ.  So at the beginning of every step they compare a
digest of everything that must be equal: 16 bytes, in flight while gradients are computed.  If
digests differ, ranks exchange the full text, and every rank raises an error with all differences.
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
from hvd_compress.wire.content import decode_bytes, encode_bytes

#: values that must be equal, by name: "method", "step" ...; lists are compared entry by entry
Terms = Mapping[str, "str | Sequence[str]"]

#: the terms of the numbers that each rank steps by, and of some elements of the weights; in which
#: steps ranks compare these
OPTIMIZER, WEIGHTS, SAMPLED_EVERY = "optimizer", "weights", 32
#: weights are close that differ by this part of the largest: processors of several kinds round
#: the optimizer's steps differently, so in time their last bits differ
_CLOSE = 1e-3

#: the term of a call between steps, instead of all others: what a rank calls that others, which are
#: in a step, do not
BETWEEN = "call"
#: what ranks send if they differ
_TERMS = "terms of a step"
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
_WEIGHTS = (
    "Weights that differ receive the same averages and stay apart. Before the first step call "
    "broadcast_parameters(model.state_dict(), root_rank=0), in TensorFlow "
    "broadcast_variables(model.variables, root_rank=0); later on change weights, and load "
    "checkpoints, on all ranks alike"
)
_OPTIMIZER = (
    "Each rank steps by its own numbers, so its weights would part from the others'. Change rates "
    "and options on all ranks alike: let a scheduler such as ReduceLROnPlateau see the average of "
    f"the loss over the ranks (hvd.allreduce). {_LOAD}"
)
#: terms by which ranks differ that are not equally far
_PROGRESS = {"step", "epoch", BETWEEN}


def agreement(terms: Terms, like: Array | None = None) -> Exchange:
    """Compare ``terms`` over the ranks.

    Args:
        like: an array; the messages are made by its backend, on its device.  ``None``: they are
            arrays of NumPy.

    Returns:
        In ``mean`` an error, to be raised after the exchanges under way, if the ranks differ in
            numbers
        that decide about their steps alone.  Otherwise something else.

    Raises:
        MismatchError: on every rank, if they differ otherwise.
    """
    text = encode(terms)
    own = digest(text)
    # The largest digest and the smallest: both are this rank's only if all are.
    mine = np.array([own, -own])
    most = yield Max(_given(mine, like))
    if (_read(most, like) != mine).any():
        everyone = yield Gather(_given(encode_bytes(text, _TERMS), like))
        texts = [
            decode_bytes(_read(frame, like), _TERMS, sender=f"rank {rank}").tobytes()
            for rank, frame in enumerate(everyone)
        ]
        if _differing(texts) <= {OPTIMIZER, WEIGHTS}:
            try:
                check(texts)
            except MismatchError as error:
                return Outcome(error, most, {})
        check(texts)
    return Outcome(most, most, {})


def _given(x: np.ndarray, like: Array | None) -> Array:
    return x if like is None else backend_of(like).from_numpy(x, like)


def _read(x: Array, like: Array | None) -> np.ndarray:
    found: np.ndarray = x if like is None else backend_of(like).to_numpy(x)
    return found


#: what helps when the ranks' tensors differ
SAME_TENSORS = (
    "All ranks must exchange the same tensors in a step. If a gradient is sparse on some ranks and "
    "dense on others, pass sparse_as_dense=True"
)


class Comparing:
    """The base of engines that compare the ranks: an error that may wait is raised when
    nothing is in flight any more."""

    _late: MismatchError | None = None

    def _note(self, compared: Outcome) -> None:
        """Keep the error that :func:`agreement` has returned, if any."""
        if isinstance(compared.mean, MismatchError):
            self._late = compared.mean

    def _raise_late(self) -> None:
        error, self._late = self._late, None
        if error is not None:
            raise error


def encode(terms: Terms) -> bytes:
    return json.dumps(dict(terms)).encode()


def digest(text: bytes) -> int:
    """63 bits, so that a signed integer holds it and its opposite."""
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


def check(everyone: Sequence[bytes]) -> None:
    """Raise ``MismatchError`` unless the encoded terms of all ranks are equal but for rounding."""
    if not _differ_by_rounding(everyone):
        raise MismatchError(differences(everyone))


def _differing(everyone: Sequence[bytes]) -> set[str]:
    terms = [json.loads(text) for text in everyone]
    names = {name for own in terms for name in own}
    return {name for name in names if any(own.get(name) != terms[0].get(name) for own in terms)}


def _differ_by_rounding(everyone: Sequence[bytes]) -> bool:
    """Return whether the encoded terms of all ranks are equal but for weights that are close.  A
    rank that has come later has looked at none."""
    terms = [json.loads(text) for text in everyone]
    samples = [own.pop(WEIGHTS) for own in terms if WEIGHTS in own]
    names = [[entry.rpartition("=")[0] for entry in own] for own in samples]
    if any(own != terms[0] for own in terms) or any(own != names[0] for own in names):
        return False
    if not samples:
        return True
    values = np.array([[float(entry.rpartition("=")[2]) for entry in own] for own in samples])
    spread = values.max(axis=0) - values.min(axis=0)
    return bool((spread <= _CLOSE * np.abs(values).max(initial=0.0)).all())


def listed(shapes: Iterable[tuple[str, Sequence[int]]]) -> list[str]:
    """Tensors as an entry of ``Terms``: names with shapes."""
    return [f"{name} {list(shape)}" for name, shape in shapes]


def differences(everyone: Sequence[bytes]) -> str:
    """The message that shows the encoded terms of all ranks, as far as they differ."""
    terms = [json.loads(text) for text in everyone]
    if any(own.get(BETWEEN) != terms[0].get(BETWEEN) for own in terms):
        terms = [{BETWEEN: own.get(BETWEEN, "a step")} for own in terms]
    lines, differing = [], set()
    for what in dict.fromkeys(key for own in terms for key in own):
        values = [own.get(what, "nothing") for own in terms]
        if all(value == values[0] for value in values):
            continue
        differing.add(what)
        if all(isinstance(value, list) for value in values):
            values = _unequal_entries(values)
        lines.append(f"  {what}")
        lines += [f"  {line}" for line in by_rank(map(_shortened, values))]
    advice = _SAME
    if differing <= {OPTIMIZER, WEIGHTS}:
        advice = _OPTIMIZER if OPTIMIZER in differing else _WEIGHTS
    if differing <= _PROGRESS:
        advice = f"Not all ranks are equally far: {UNEVEN}. {_LOAD}"
    return "\n".join(["the ranks differ in what must be the same:", *lines, advice])


def by_rank(values: Iterable[str]) -> list[str]:
    """Return a line for each of the ranks' values, with the ranks that have it."""
    found: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        found.setdefault(value, []).append(str(rank))
    return [f"  rank {', '.join(ranks)}: {value}" for value, ranks in found.items()]


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
