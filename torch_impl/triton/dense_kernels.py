"""The Triton kernels of :mod:`hvd_compress.torch.triton.dense`.

The table of tensors has elements, and their beginnings when all are end to end.  That of addresses
has those of gradients, results and velocities.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .kernels import INFINITY, magnitudes
from .task_kernels import in_range, taken

_N, _START, _FIELDS = (tl.constexpr(i) for i in range(3))
_X, _OUT, _VELOCITY, _ARRAYS = (tl.constexpr(i) for i in range(4))


@triton.jit
def _block(tensors, blocks, width: tl.constexpr):
    """The program's tensor, its elements there, which of these there are, and where they begin."""
    t, block = taken(blocks)
    at = block * width + tl.arange(0, width)
    row = tensors + t * _FIELDS
    return t, at, at < tl.load(row + _N), tl.load(row + _START)


@triton.jit
def _array(addresses, t, array: tl.constexpr):
    return tl.load(addresses + t * _ARRAYS + array).to(tl.pointer_type(tl.float32))


@triton.jit
def _note(infinite, t, x, inside):
    """Note whether an element is not finite."""
    if tl.max(tl.where(inside, magnitudes(x), 0)) >= INFINITY:
        tl.atomic_max(infinite + t, 1, sem="relaxed")


@triton.jit
def join(addresses, tensors, blocks, own, infinite, width: tl.constexpr):
    """Copy a block of a gradient to where all are end to end."""
    t, at, inside, start = _block(tensors, blocks, width)
    x = tl.load(_array(addresses, t, _X) + at, mask=inside)
    tl.store(own + start + at, x, mask=inside)
    _note(infinite, t, x, inside)


@triton.jit
def spoil(tensors, blocks, own, infinite, width: tl.constexpr):
    """Write NaN into all of a tensor that is not finite, so that the others see nothing else."""
    t, at, inside, start = _block(tensors, blocks, width)
    if tl.load(infinite + t) != 0:
        tl.store(own + start + at, float("nan"), mask=inside)


@triton.jit(do_not_specialize=["size"])
def look(tensors, blocks, total, infinite, size, width: tl.constexpr):
    """Note of which tensors the mean is not finite."""
    t, at, inside, start = _block(tensors, blocks, width)
    x = tl.load(total + start + at, mask=inside, other=0.0)
    _note(infinite, t, tl.div_rn(x, tl.full((width,), size, tl.float32)), inside)


@triton.jit(do_not_specialize=["size"])
def settle(
    addresses, tensors, blocks, total, infinite, momenta, size,
    kind: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Write a block of the mean, or with a ``kind`` of the direction, and the velocity: 1 with
    momentum, 2 with Nesterov's.  A mean that is not finite is the direction, and velocities stay,
    within range."""
    t, at, inside, start = _block(tensors, blocks, width)
    x = tl.load(total + start + at, mask=inside, other=0.0)
    mean = tl.div_rn(x, tl.full((width,), size, tl.float32))
    direction = mean
    if kind != 0:
        to = _array(addresses, t, _VELOCITY) + at
        old, momentum = tl.load(to, mask=inside), tl.load(momenta + t)
        if kind == 1:
            velocity = momentum * old + mean
            direction = velocity
        else:
            velocity = momentum * (old + mean)
            direction = velocity + mean
        fine = tl.load(infinite + t) == 0
        tl.store(to, tl.where(fine, velocity, in_range(old)), mask=inside)
        direction = tl.where(fine, direction, mean)
    tl.store(_array(addresses, t, _OUT) + at, direction, mask=inside)
