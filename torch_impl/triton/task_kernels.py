"""How a Triton kernel finds its block of a task, see :mod:`hvd_compress.torch.triton.tasks`."""

from __future__ import annotations

import triton
import triton.language as tl

#: elements that are added up in one go, which defines the sum of a run
SUMMED = tl.constexpr(4096)

#: the largest magnitude of which a few can be added
_IN_RANGE = tl.constexpr(float(2.0**104 - 2.0**80))

_COLUMNS = tl.constexpr(6)
#: of a task: its first element, how many there are, how many of them have a head in common; the
#: place of the first head (float32); and the first byte of the code behind its heads, and how many
START, N, LENGTH, HEADS, CODE, SIZE = (tl.constexpr(i) for i in range(6))


@triton.jit
def taken(blocks):
    """The task of a program, and its block of it."""
    at = blocks + 2 * tl.program_id(0)
    return tl.load(at), tl.load(at + 1)


@triton.jit
def in_range(x):
    """The state after a step that is not finite, given the one before it."""
    x = tl.where(x > _IN_RANGE, _IN_RANGE, x)
    return tl.where(x < -_IN_RANGE, -_IN_RANGE, x)


@triton.jit
def entry(tasks, task, column: tl.constexpr):
    """A number of the table; places are 64-bit integers, what is within a task needs less."""
    return tl.load(tasks + task.to(tl.int64) * _COLUMNS + column)


@triton.jit
def short(tasks, task, column: tl.constexpr):
    return entry(tasks, task, column).to(tl.int32)
