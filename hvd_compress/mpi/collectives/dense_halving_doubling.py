"""Recursive halving and doubling: partners at distance 1, 2, 4 ..., each time half of the data.

2 log2 P rounds and 2 n (P - 1) / P bytes from every rank, if P is a power of two (Thakur,
Rabenseifner, Gropp, 2005).  For other P the ranks form blocks of the powers of two that P is made
of, 6 = 4 + 2.  Each block reduces and scatters within itself; sums move up from the smallest block
to the largest, and results down again (Rabenseifner and Traeff, 2004).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from hvd_compress.mpi.collectives.dense_algorithm import Allreduce
from hvd_compress.mpi.transport.channel import Channel
from hvd_compress.mpi.transport.progress import Algorithm, Wait
from hvd_compress.mpi.transport.reduction import Reduction


def _half(part: slice, which: int) -> slice:
    middle = (part.start + part.stop) // 2
    return slice(part.start, middle) if which == 0 else slice(middle, part.stop)


def _owned(n: int, member: int, rounds: int) -> list[slice]:
    """Return the parts that member ``member`` of a block still holds after 0, 1 ... ``rounds``
    halvings."""
    ranges = [slice(0, n)]
    for step in range(rounds):
        ranges.append(_half(ranges[-1], member >> step & 1))
    return ranges


def _halve(
    channel: Channel, members: Sequence[int], partial: Any, reduction: Reduction
) -> Generator[Wait, None, slice]:
    """Reduce-scatter among ``members``, and return the part that this rank holds afterwards."""
    member, rounds = members.index(channel.rank), len(members).bit_length() - 1
    ranges = _owned(len(partial), member, rounds)
    arriving = reduction.scratch((len(partial) + 1) // 2)
    for step in range(rounds):
        peer = members[member ^ (1 << step)]
        keep = ranges[step + 1]
        give = _half(ranges[step], 1 - (member >> step & 1))
        taken = arriving[: keep.stop - keep.start]
        given = partial[give]
        yield channel.exchange({peer: taken}, {peer: given}, "halving", (step + 1, rounds))
        own = partial[keep]
        reduction.add(own, taken, own)
    return ranges[-1]


def _double(channel: Channel, members: Sequence[int], out: Any) -> Algorithm:
    """Allgather among ``members`` the parts that :func:`_halve` left with each."""
    member, rounds = members.index(channel.rank), len(members).bit_length() - 1
    ranges = _owned(len(out), member, rounds)
    for step in reversed(range(rounds)):
        peer = members[member ^ (1 << step)]
        theirs = out[_half(ranges[step], 1 - (member >> step & 1))]
        own = out[ranges[step + 1]]
        yield channel.exchange({peer: theirs}, {peer: own}, "doubling", (rounds - step, rounds))


def _blocks(size: int) -> list[range]:
    """Return the powers of two that add up to ``size``, the largest first."""
    blocks, start = [], 0
    for bit in reversed(range(size.bit_length())):
        if size >> bit & 1:
            blocks.append(range(start, start + (1 << bit)))
            start += 1 << bit
    return blocks


def halving_doubling(channel: Channel, x: Any, out: Any, reduction: Reduction) -> Algorithm:
    """Reduce the flat ``x`` into ``out``, which may be ``x``."""
    rank, n = channel.rank, len(x)
    partial = reduction.scratch(n)
    reduction.widen(x, partial)
    blocks = _blocks(channel.size)
    index = next(i for i, block in enumerate(blocks) if rank in block)
    block = blocks[index]
    mine = yield from _halve(channel, block, partial, reduction)

    # A member of a larger block holds a part of what the member of a smaller one with the same
    # low bits holds, because both halved by the same bits first.
    smaller = blocks[index + 1] if index + 1 < len(blocks) else None
    larger = blocks[index - 1] if index > 0 else None
    below = smaller[(rank - block.start) % len(smaller)] if smaller else None
    above: dict[int, slice] = {}
    if larger:
        rounds = len(larger).bit_length() - 1
        for member in range(rank - block.start, len(larger), len(block)):
            above[larger[member]] = _owned(n, member, rounds)[-1]

    if below is not None:
        taken = reduction.scratch(mine.stop - mine.start)
        yield channel.exchange({below: taken}, {}, "sums from the smaller block")
        own = partial[mine]
        reduction.add(own, taken, own)
    if above:
        sums = {peer: partial[part] for peer, part in above.items()}
        yield channel.exchange({}, sums, "sums to the larger block")
        results = {peer: out[part] for peer, part in above.items()}
        yield channel.exchange(results, {}, "results from the larger block")
    else:
        reduction.finish(partial[mine], out[mine])
    if below is not None:
        yield channel.exchange({}, {below: out[mine]}, "results to the smaller block")
    yield from _double(channel, block, out)


#: the first message is half of a block
ALGORITHM = Allreduce("halving_doubling", halving_doubling, lambda p: 2)
