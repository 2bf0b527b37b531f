"""Codecs for tensors in a GPU's memory, in Triton, with the same bits as on the host.

Codes are made where tensors are, and come to the host in one copy.  With them comes a note of each
tensor whether it was finite: the only thing that the host waits for.  Codes of other ranks are
copied to the GPU as bytes, and decoded or added there.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hvd_compress.codecs import Codec
from hvd_compress.kernels import is_compiled
from hvd_compress.kernels.codecs import Signs, move, place_of, skip, words_of

from ..backend import from_numpy
from . import code_loops as loops
from .codec_kernels import ADD, INFINITE, LEFT, NOTES, TAKE_OFF, WRITE
from .tasks import Layout

#: places within a tensor and its code are 32-bit integers
_MOST = 2**30
_Random = np.random.Generator


class Codes:
    """The codes of runs of elements of a flat array, all at once; codecs differ in the length of
    their runs at most.

    Args:
        codecs, spans: of the runs.
        like: a tensor on the GPU.
        places: the first byte of each run's code, multiples of 4; ``None``: they are end to end.

    Attributes:
        layout: the tables of the kernels.
    """

    def __init__(
        self,
        codecs: Sequence[Codec],
        spans: Sequence[slice],
        like: torch.Tensor,
        places: Sequence[int] | None = None,
    ) -> None:
        self._loops = loops.loops_of(codecs[0])
        pairs = zip(codecs, spans, strict=True)
        self.layout = Layout([loops.span_of(codec, own) for codec, own in pairs], like, places)
        self._codes, self._like = self.layout.codes, self.layout.tasks

    @staticmethod
    def takes(codec: Codec, n: int, once: bool = True) -> bool:
        """Return whether there are codes of ``n`` elements, or with ``once=False`` of several runs
        for which one generator draws."""
        own = loops.loops_of(codec)
        if own is None or not 0 < n < _MOST or codec.takes_non_finite:
            return False
        if own.draws and not is_compiled():  # which say where random numbers begin
            return False
        return once or not _draws_zeros(own)

    @property
    def draws(self) -> bool:
        return self._loops.draws or _draws_zeros(self._loops)

    def can_draw(self, random: _Random | None) -> bool:
        """Return whether kernels can go on in a generator's stream."""
        return not self.draws or self._place_of(random) is not None

    def encode(
        self,
        x: torch.Tensor,
        randoms: Sequence[_Random | None],
        codes: torch.Tensor | None = None,
    ) -> Made:
        """Return the codes of ``x``, given the generator of each run; in memory of their own, or
        where ``codes`` are.

        Raises:
            ValueError: kernels can draw nothing from a generator.
        """
        draws = self._drawn(randoms) if self.draws else None
        nbytes = self.layout.nbytes if codes is None else 0
        size = nbytes + 4 * NOTES.value * len(self.layout)
        room = torch.empty(size, dtype=torch.uint8, device=x.device)
        notes = room[nbytes:].view(torch.int32)
        notes.zero_()
        tasks = loops.Tasks(x, self.layout, draws, notes)
        codes = room[:nbytes] if codes is None else codes
        with torch.cuda.device_of(x):
            loops.encode(self._loops, tasks, codes)
        return Made(self._loops, tasks, codes, room)

    def read(
        self, codes: torch.Tensor, out: torch.Tensor, add: bool = False, ranks: int = 1
    ) -> None:
        """Write the values of codes on the GPU, or add those of several ranks one after the
        other."""
        with torch.cuda.device_of(out):
            loops.decode(self._loops, self.layout, codes, out, ADD if add else WRITE, ranks)

    def look(self, x: torch.Tensor) -> torch.Tensor:
        """Return notes of which runs of ``x`` are not finite."""
        notes = torch.zeros(NOTES.value * len(self.layout), dtype=torch.int32, device=x.device)
        with torch.cuda.device_of(x):
            loops.look(loops.Tasks(x, self.layout, None, notes), INFINITE)
        return notes

    def decode(self, codes: Sequence[np.ndarray], out: torch.Tensor, add: bool = False) -> None:
        """Write what the codes of all runs decode to, or add it."""
        nbytes = self.layout.nbytes
        room = torch.empty(nbytes, dtype=torch.uint8, pin_memory=out.is_cuda)
        on_host = room.numpy()
        for own, code in zip(self._codes, codes, strict=True):
            on_host[own] = code
        moved = room.to(out.device, non_blocking=True)
        self.read(moved, out, add)

    def _place_of(self, random: _Random | None) -> Any:
        if random is None:
            return None
        return words_of(random) if _draws_zeros(self._loops) else place_of(random)

    def _drawn(self, randoms: Sequence[_Random | None]) -> torch.Tensor:
        """Return the place in its stream of each run; runs that share a generator are one after the
        other."""
        rows, places, drawn = [], {}, {}
        for random, n in zip(randoms, self.layout.sizes, strict=True):
            number = id(random)
            if number not in places:
                places[number], drawn[number] = self._place_of(random), 0
            if (place := places[number]) is None:
                raise ValueError(f"kernels can draw nothing from {random!r}")
            key, counter, first = place
            rows.append((*key, *counter, first + drawn[number]))
            drawn[number] += n
        return from_numpy(np.array(rows, np.uint64).view(np.int64), self._like)


class Made:
    """Codes that were made, in the memory of a GPU.

    Attributes:
        notes: of each run, whether it and what is left of it was finite, and how many zeros were
            drawn for.
    """

    def __init__(
        self, own: Any, tasks: loops.Tasks, codes: torch.Tensor, room: torch.Tensor
    ) -> None:
        self._loops, self._tasks, self._codes, self._room = own, tasks, codes, room
        self.notes = tasks.notes

    def decode(self, out: torch.Tensor) -> None:
        """Write what they decode to, each run where its elements are."""
        self._decode(out, WRITE)

    def take_off(self, out: torch.Tensor) -> None:
        """Subtract what they decode to."""
        self._decode(out, TAKE_OFF)

    def look(self, left: torch.Tensor) -> None:
        """Note whether what is left, the elements of the runs, is finite."""
        with torch.cuda.device_of(left):
            loops.look(self._tasks._replace(x=left), LEFT)

    def arrived(self) -> tuple[list[np.ndarray], np.ndarray]:
        """Return the codes of each run, and the notes.  The host waits for it."""
        on_host = torch.empty_like(self._room, device="cpu", pin_memory=self._room.is_cuda)
        arrived = on_host.copy_(self._room).numpy()
        layout = self._tasks.layout
        notes = arrived[layout.nbytes :].view(np.int32).reshape(-1, NOTES.value)
        return [arrived[own] for own in layout.codes], notes

    def _decode(self, out: torch.Tensor, how: Any) -> None:
        with torch.cuda.device_of(out):
            loops.decode(self._loops, self._tasks.layout, self._codes, out, how)


def placed(codec: Codec, like: torch.Tensor) -> CoderOnDevice | None:
    """Return the codec for flat tensors on the GPU of ``like``.

    ``None``: the host alone has loops, as for float64 and for codecs that NumPy serves.
    """
    if like.dtype != torch.float32 or not Codes.takes(codec, like.numel()):
        return None
    return CoderOnDevice(codec, like.device)


class CoderOnDevice:
    """``codec`` with its bytes in host memory and its numbers, float32, on a GPU; see
    :class:`hvd_compress.codecs.base.Coder`."""

    def __init__(self, codec: Codec, device: torch.device) -> None:
        self._codec, self._device = codec, device

    def __repr__(self) -> str:
        return repr(self._codec)  # which is what frames are marked with

    def size(self, n: int, dtype: np.dtype) -> int:
        return self._codec.size(n, dtype)

    def zeros(self, n: int, dtype: np.dtype) -> torch.Tensor:
        return torch.zeros(n, dtype=torch.float32, device=self._device)

    def put(
        self,
        x: torch.Tensor,
        random: np.random.Generator,
        out: np.ndarray,
        sent: torch.Tensor | None = None,
    ) -> bool:
        n = x.numel()
        if not n:  # of which a code may still have a scale
            return self._codec.put(x.cpu().numpy(), random, out)
        codes = _codes_of(self._codec, n, self._device)
        if not codes.can_draw(random):
            return self._put_by_host(x, random, out, sent)
        made = codes.encode(x, [random])
        if sent is not None:
            made.decode(sent)
        (code,), ((infinite, zeros, _),) = made.arrived()
        if infinite:
            return False
        if _draws_zeros(codes._loops):
            skip(random, int(zeros))
        elif (place := place_of(random)) and codes.draws:
            move(random, place, n)
        out[:] = code
        return True

    def _put_by_host(
        self,
        x: torch.Tensor,
        random: np.random.Generator,
        out: np.ndarray,
        sent: torch.Tensor | None,
    ) -> bool:
        fine = self._codec.put(x.cpu().numpy(), random, out)
        if fine and sent is not None:
            self.decode_to(out, sent)
        return fine

    def decode_to(self, code: np.ndarray, out: torch.Tensor, add: bool = False) -> None:
        if out.numel():
            _codes_of(self._codec, out.numel(), self._device).decode([code], out, add)


@functools.lru_cache(maxsize=256)
def _codes_of(codec: Codec, n: int, device: torch.device) -> Codes:
    return Codes([codec], [slice(0, n)], torch.empty(0, device=device))


def _draws_zeros(own: Any) -> bool:
    return isinstance(own, Signs) and own.draws_zeros
