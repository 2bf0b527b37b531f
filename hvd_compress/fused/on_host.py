"""Fused exchanges of symbols: when the graph runs, it calls the loops on the host, twice a bucket.

While a graph is traced, arrays have no values that loops could take.  So an exchange becomes two
functions of the graph.  The first takes the gradients and states of all tensors, and returns the
bucket's message; the second takes the messages of all ranks, and returns averages and new states.
Between the two the exchange, which is that of NumPy arrays, waits for the messages.

Arrays are neither copied on their way in nor out, and a variable that is assigned such a result
adopts its memory.  When it lets go of it, the array itself says: hence :class:`Memory`.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.backends.weak import weakly
from hvd_compress.base import Context, Outcome, Sparse
from hvd_compress.requests import Gather, Request

_ALIGNMENT = 64  # bytes; libraries copy what does not begin at such an address


class Memory:
    """Float32 arrays whose memory is used again after they, and all views of them, are gone.

    An array that is taken is a new object over known memory, to which it alone leads.  When it is
    deleted, which views of it prevent, those of libraries included, the memory comes back here.

    Attributes:
        nbytes: of all that was ever needed at once.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._free: dict[int, deque[np.ndarray]] = {}
        self._taken: dict[int, weakref.ref[np.ndarray]] = {}

    def take(self, n: int) -> np.ndarray:
        """Return an array of ``n`` elements, in which there is anything."""
        free = self._free.setdefault(n, deque())
        try:
            known = free.pop()  # in one step, like the append below: there may be several threads
        except IndexError:
            whole = np.empty(n + _ALIGNMENT // 4, np.float32)
            self.nbytes += whole.nbytes
            known = _aligned(whole, n)
        taken = np.frombuffer(known.data, np.float32)
        number = id(taken)

        def give_back(_: Any) -> None:
            del self._taken[number]
            free.append(known)

        self._taken[number] = weakref.ref(taken, give_back)
        return taken


class _Kept(dict[str, Any]):
    """What a graph keeps between its calls, for as long as the binding is there."""


def _aligned(array: np.ndarray, n: int) -> np.ndarray:
    start = -array.ctypes.data % _ALIGNMENT // array.itemsize
    return array[start : start + n]


def exchange_on_host(
    form: Callable[[list[Any]], Generator[Request, Any, list[Outcome]]],
    tensors: Sequence[Any],
    size: int | None,
    decode: Callable[[np.ndarray], Sequence[np.ndarray]],
    counts: Sequence[int],
) -> Generator[Request, Any, list[Outcome]]:
    """Run the exchange of a bucket of symbols.

    Args:
        form: the exchange of a bucket of NumPy arrays, which gathers one message; its outcomes have
            no ``update``.
        tensors: its arguments, but with symbols; they have a ``gradient``, which is float32, ``x``,
            a ``state`` and a ``context``.
        size: bytes of the message; ``None`` if ranks' messages may differ in size.
        decode: returns the indices (int64), each into its tensor, and the values (float32) of a
            message, which are what this rank has sent.
        counts: how many of them belong to each tensor.
    """
    xp = backend_of(tensors[0].x)
    keys = [sorted(t.state) for t in tensors]
    shapes = [xp.shape(t.gradient) for t in tensors]
    of_all_graphs = tensors[0].context.scratch
    kept = _Kept(memory=of_all_graphs.setdefault("memory", Memory()))
    of_all_graphs.setdefault("kept", []).append(kept)
    # Of the contexts, what is no symbol: a graph keeps its functions, and what these know.
    tensors = [
        tensor._replace(context=Context(c.name, c.rank, c.size, momentum=c.momentum, shape=c.shape))
        for tensor, c in ((tensor, tensor.context) for tensor in tensors)
    ]

    def begin(kept: _Kept, *arrays: np.ndarray) -> list[np.ndarray]:
        each, own = iter(arrays), []
        for tensor, names in zip(tensors, keys, strict=True):
            x = next(each)
            state = {key: next(each) for key in names}
            context = tensor.context._replace(scratch=kept)
            host = {"gradient": x.reshape(context.shape), "x": x, "state": state}
            own.append(tensor._replace(**host, context=context))
        kept["waiting"] = form(own)  # what waited, if a step has failed, is forgotten
        request = next(kept["waiting"])
        assert isinstance(request, Gather)
        return [request.payload]

    def finish(kept: _Kept, *messages: np.ndarray) -> list[np.ndarray]:
        try:
            kept.pop("waiting").send(list(messages))
        except StopIteration as stop:
            outcomes = stop.value
        return [
            x
            for outcome, names in zip(outcomes, keys, strict=True)
            for x in (outcome.mean, *(outcome.state[key] for key in names))
        ]

    arrays = [a for t, names in zip(tensors, keys, strict=True) for a in _inputs(t, names)]
    (message,) = xp.on_host(weakly(kept, begin), arrays, [("uint8", size)], tensors[0].x)
    messages = yield Gather(message, size is not None)
    outputs = [
        ("float32", shape)
        for tensor, names, gradient in zip(tensors, keys, shapes, strict=True)
        for shape in (gradient, *(xp.shape(tensor.state[key]) for key in names))
    ]
    results = iter(xp.on_host(weakly(kept, finish), messages, outputs, tensors[0].x))
    of_all = sum(counts)
    indices, values = xp.on_host(
        decode, [message], [("int64", of_all), ("float32", of_all)], tensors[0].x
    )
    sent = zip(xp.split(indices, counts), xp.split(values, counts), strict=True)
    return [
        Outcome(next(results), Sparse(*own), {key: next(results) for key in names})
        for own, names in zip(sent, keys, strict=True)
    ]


def _inputs(tensor: Any, keys: Sequence[str]) -> list[Any]:
    return [tensor.x, *(tensor.state[key] for key in keys)]
