"""Frames of every kind, each with what reads it and what a result must look like."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from benchmarks.reliability.damage import HARMLESS, NOTICED, UNCHANGED, spoil
from hvd_compress.backends import backend_of
from hvd_compress.base import Context
from hvd_compress.codecs.frame import decode_coded, encode_coded
from hvd_compress.errors import ConfigError, PayloadError, UnsupportedError
from hvd_compress.methods.rows import as_rows
from hvd_compress.requests import Gather
from hvd_compress.systems.servers import messages
from hvd_compress.wire import decode, decode_sparse, encode_dense, encode_sparse
from hvd_compress.wire.frame import decode_dense
from hvd_compress.wire.rows import decode_rows, encode_rows
from tests.codecs.test_codecs import EVERY
from tests.frames import sealed

with warnings.catch_warnings():  # two methods want other learning rates, which nobody takes here
    warnings.simplefilter("ignore")
    from tests.method_table import ROWS

_F4, _F8 = np.dtype(np.float32), np.dtype(np.float64)
#: elements of a tensor, and of what is sent of it
N, COUNT = 700, 24


class Frame(NamedTuple):
    """``read(frame)`` returns arrays, of which those of indices, numbered in ``places``, must be
    ascending within ``n``, and the others be as many as ``sizes`` says, where that is known."""

    name: str
    frame: np.ndarray
    read: Callable[[np.ndarray], tuple[Any, ...]]
    n: int = 0
    places: tuple[int, ...] = ()
    sizes: tuple[int | None, ...] = ()

    def judge(self, damaged: np.ndarray, has_right_checksum: bool) -> str:
        """Return what comes of a damaged frame, one of the campaign's words; raise whatever else
        its reader raises, or ``AssertionError`` for a result that should not be."""
        try:
            found = self.read(damaged)
        except PayloadError:
            return NOTICED
        if np.array_equal(damaged, self.frame):
            return UNCHANGED
        if not has_right_checksum:
            raise AssertionError("damage was not noticed")
        if not self.is_sane(found):
            raise AssertionError(f"a result out of range: {found}")
        return HARMLESS

    def is_sane(self, found: tuple[Any, ...]) -> bool:
        """Return whether nothing of a result could do harm: be it wrong, if its checksum is
        right."""
        for i, x in enumerate(found):
            if i in self.places:
                if x is not None and x.size and (x[0] < 0 or x[-1] >= self.n):
                    return False
                if x is not None and not (x[1:] > x[:-1]).all():
                    return False
            elif self.sizes and self.sizes[i] is not None and x.size != self.sizes[i]:
                return False
        return True


class Case:
    """One case: a frame, and its damage.  Half of the damaged frames get the checksum of their
    bytes, as no accident would."""

    def __init__(self, name: str, draw: random.Random) -> None:
        frames = _by_name(draw.randrange(8))
        self.kind, self.frame = name.split()[0], frames[name]
        self.damaged = spoil(self.frame.frame, [f.frame for f in frames.values()], draw)
        self.forged = draw.random() < 0.5 and self.damaged.size >= 16
        if self.forged:
            self.damaged = sealed(self.damaged)

    def __str__(self) -> str:
        return f"{self.frame.name}, frame {self.damaged.tobytes().hex()}"

    def outcome(self) -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", RuntimeWarning)  # of NumPy, about forged numbers
            return self.frame.judge(self.damaged, self.forged)


def names() -> list[str]:
    return [*_by_name(0)]


@functools.cache
def _by_name(seed: int) -> dict[str, Frame]:
    return {frame.name: frame for frame in every(seed)}


def every(seed: int = 0) -> list[Frame]:
    """Return frames of all kinds, the same for a seed."""
    return [*_wire(seed), *_coded(seed), *_others(seed), *_of_methods(seed)]


def contexts(name: str) -> dict[str, Any]:
    """Return what a row of the table of methods says of the context."""
    return {key: x for key, x in ROWS[name].context.items() if key in Context._fields}


def _numbers(seed: int, n: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(n).astype(dtype)


def _places(seed: int, n: int = N) -> np.ndarray:
    return np.sort(np.random.default_rng(seed).choice(n, COUNT, replace=False))


def _wire(seed: int) -> Iterator[Frame]:
    for dtype in ("float16", "float32", "float64"):
        x, places = _numbers(seed, COUNT, dtype), _places(seed)
        for kind, n in (("int32", N), ("packed", N), ("packed", 2**20), ("int32", 2**33)):
            where = places * (n // N)
            yield Frame(
                f"sparse {dtype} {kind} {n}",
                encode_sparse(where, x, n, kind),
                lambda f, n=n, d=dtype: decode_sparse(f, n, d),
                n,
                (0,),
            )
        yield Frame(
            f"sparse {dtype} of known count",
            encode_sparse(places, x, N, "packed", whole=9 * N),
            lambda f, d=dtype: decode_sparse(f, N, d, COUNT, whole=9 * N),
            N,
            (0,),
            (None, COUNT),
        )
        yield Frame(
            f"dense or sparse {dtype}",
            encode_dense(_numbers(seed, N, dtype)),
            lambda f, d=dtype: decode(f, N, d),
            N,
            (0,),
        )
    yield Frame(
        "dense bfloat16",
        encode_dense(_numbers(seed, N), "bfloat16"),
        lambda f: (decode_dense(f, N, "bfloat16"),),
        sizes=(N,),
    )


def _coded(seed: int) -> Iterator[Frame]:
    def made(codec: Any, dtype: np.dtype, n: int | None, packed: bool, row: int) -> Frame:
        random, x = np.random.default_rng(seed), _numbers(seed, COUNT, dtype)
        options = {} if n is None else {"indices": _places(seed, n)[: COUNT // row], "n": n}
        frame = encode_coded(codec, x, random, packed=packed, row=row, **options)

        def read(frame: np.ndarray, count: int | None = None) -> tuple[Any, ...]:
            found, values = decode_coded(codec, frame, count, dtype, n, row=row)
            return found, values

        name = f"coded {codec!r} {dtype} n={n} packed={packed} row={row}"
        return Frame(name, frame, read, n or 0, (0,))

    for codec in EVERY:
        yield made(codec, _F4, None, False, 1)
        yield made(codec, _F4, N, False, 1)
        yield made(codec, _F8, 2**20, True, 1)
        yield made(codec, _F4, N, True, 4)


def _others(seed: int) -> Iterator[Frame]:
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, COUNT * 12, np.uint8)
    yield Frame(
        "rows", encode_rows(_places(seed), raw, N), lambda f: decode_rows(f, N, 12), N, (0,)
    )
    for text in ("whole", "float16", "int8", "float8"):
        rows, values = as_rows(text), _numbers(seed, COUNT * 6).reshape(COUNT, 6)
        message, _ = rows.encode(_places(seed), values, N, "float32")
        yield Frame(
            f"rows {text}",
            message,
            lambda f, rows=rows, like=values: rows.decode(f, like, N, "float32"),
            N,
            (0,),
        )
    for kind in messages.MessageKind:
        parts = [random.integers(0, 256, size, np.uint8) for size in (0, 9, 64)]
        message = messages.encode(messages.ServerMessage(kind, 1, 5, parts))

        def read(f: np.ndarray) -> tuple[Any, ...]:
            found = messages.decode(f, "a rank")
            return (np.array([found.kind, found.flag, found.number]), *found.parts)

        yield Frame(f"server {kind.name}", message, read)
    # What several tensors send, with a table of its parts.
    own = [encode_sparse(_places(seed + i), _numbers(i, COUNT), N, "packed") for i in range(3)]
    requests = [Gather(frame) for frame in own]

    def joined(f: np.ndarray) -> tuple[Any, ...]:
        parts = Gather.cut(requests, [f], 0)
        found = [decode_sparse(part[0], N, "float32") for part in parts]
        return tuple(x for pair in found for x in pair)

    message = Gather.join(requests).payload
    yield Frame("joined", message, joined, N, (0, 2, 4))


def _of_methods(seed: int) -> Iterator[Frame]:
    for name, row in ROWS.items():
        x = _numbers(seed, 20 * 35).reshape(20, 35)
        method = row.method.for_tensor("w", x.shape)
        context = Context("w", size=4, step=3, epoch=3, seed=seed, **contexts(name))
        if method.needs_gradient_norm:
            context = context._replace(gradient_norm=backend_of(x).norm(x))
        try:
            message = method.encode(x, method.init(x), context).message

            def read(f: np.ndarray, m: Any = method, like: Any = x, c: Any = context) -> Any:
                return (m.decode(f, like, c),)

            read(message)
        except (UnsupportedError, ConfigError):
            continue  # it takes all ranks to say what is sent: see the campaign of exchanges
        yield Frame(f"method {name}", message, read, sizes=(x.size,))
