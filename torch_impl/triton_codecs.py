"""Codecs for tensors in a GPU's memory, in Triton, with the same bits as on the host.

Codes are made where a tensor is, and come to the host in one copy, with a note whether the tensor
was finite: the only thing that the host waits for.  What arrives from other ranks is copied to the
GPU as bytes, and decoded or added there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hvd_compress.codecs import Codec
from hvd_compress.codecs.compiled import Compiled
from hvd_compress.kernels.codecs import skip

from .backend import from_numpy
from .triton_code_loops import LOOPS, Task

#: places within a tensor and its code are 32-bit integers
_MOST = 2**30


def placed(codec: Codec, like: torch.Tensor) -> Placed | None:
    """Return the codec for flat tensors on the GPU of ``like``; ``None`` where only the host has
    loops: for float64, and for codecs that NumPy serves."""
    if like.dtype != torch.float32 or not 0 < like.numel() < _MOST:
        return None
    loops = codec._loops if isinstance(codec, Compiled) else None
    return Placed(codec, loops, like) if type(loops) in LOOPS else None


class Placed:
    """``codec`` with its bytes in host memory and its numbers, float32, on the GPU of ``like``; see
    :class:`hvd_compress.codecs.base.Coder`."""

    def __init__(self, codec: Codec, loops: Any, like: torch.Tensor) -> None:
        self._codec, self._loops, self._device = codec, loops, like.device
        self._encode, self._decode = LOOPS[type(loops)]

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
        if not x.numel():  # of which a code may still have a scale
            return self._codec.put(x.cpu().numpy(), random, out)
        state = random.bit_generator.state
        end = out.size + -out.size % 8
        room = torch.empty(end + 8, dtype=torch.uint8, device=x.device)
        code, notes = room[: out.size], room[end:].view(torch.int32)
        notes.zero_()
        with torch.cuda.device_of(x):
            self._encode(self._loops, Task(x, random, notes), code)
            if sent is not None:
                self._decode(self._loops, code, sent, False)
        on_host = torch.empty_like(room, device="cpu", pin_memory=x.is_cuda)
        arrived = on_host.copy_(room).numpy()  # the only thing that the host waits for
        infinite, zeros = arrived[end:].view(np.int32).tolist()
        if infinite:
            random.bit_generator.state = state
            return False
        skip(random, zeros)
        out[:] = arrived[: out.size]
        return True

    def decode_to(self, code: np.ndarray, out: torch.Tensor, add: bool = False) -> None:
        if out.numel():
            with torch.cuda.device_of(out):
                self._decode(self._loops, from_numpy(code, out), out, add)
