"""Hierarchical allreduce: inside each node, then across nodes, then inside again.

The network between nodes is slower than memory, so as little as possible is sent over it, and all
ranks of a node share the work (Goyal et al., 2017, also reduce inside the node first).  With L
ranks on each of N nodes and n bytes:

even nodes
    Reduce-scatter inside; each rank then has a part of n / L and reduces it across nodes with the
    ranks that have the same part there; allgather inside.  Every rank sends 2 n / L (N - 1) / N
    bytes across and 2 n (L - 1) / L inside.
uneven nodes
    The first rank of a node adds up the whole array, reduces it with the first ranks of the other
    nodes, and sends the result to its node.

Inside a node sums are made in the order of the ranks.  Half precisions are added in float32 on both
levels, sent between nodes as float32, and rounded once at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvd_compress.config import check_choice
from hvd_compress.mpi.calls.allreduce import allreduce
from hvd_compress.mpi.dense import ALGORITHMS
from hvd_compress.mpi.dense.running import CHUNK, DEPTH, Comm, check_chunk, put, target_of
from hvd_compress.mpi.transport.arrays import Flat, describe, flatten
from hvd_compress.mpi.transport.communicator import Channel, Communicator, nbytes, others
from hvd_compress.mpi.transport.nodes import Nodes, named, nodes_of
from hvd_compress.mpi.transport.progress import Algorithm, Wait, Work
from hvd_compress.mpi.transport.reduction import Reduction, reduction
from hvd_compress.mpi.tuning.measuring import model_of
from hvd_compress.sharding import shards_of


def hierarchical_allreduce(
    x: Any,
    *,
    op: str = "sum",
    algorithm: str = "auto",
    out: Any = None,
    comm: Comm = None,
    ranks_per_node: int | None = None,
    chunk: int = CHUNK,
) -> Any:
    """Reduce an array first inside each node and then between nodes, for clusters whose nodes run
    several ranks.

    If all ranks share one node, or each has its own, this is the same as :func:`allreduce`.

    Args:
        x, op, out, comm, chunk: as for :func:`allreduce`.
        algorithm: between nodes: "ring", "halving_doubling", "direct", "mpi", or "auto".
        ranks_per_node: the number of consecutive ranks that make a node; ``None`` asks MPI which
            ranks share memory.  A number smaller than the ranks of a machine splits the machine.

    Raises:
        ConfigError, UnsupportedError, MismatchError, CollectiveTimeout: see :func:`allreduce`.
    """
    communicator = Communicator.of(comm)
    with communicator.told():
        check_choice("algorithm", algorithm, ("auto", *ALGORITHMS))
        check_chunk(chunk)
        flat = flatten(x)
        target = target_of(out, x, flat)
    name = f"{communicator.named(algorithm)} across nodes"
    name += f" of {ranks_per_node}" if ranks_per_node is not None else ""
    call = f"hierarchical_allreduce({describe(flat)}, {op}, {name})"
    communicator.agree(call)
    nodes = nodes_of(communicator, ranks_per_node)
    if nodes.is_flat or not len(flat.array):
        return allreduce(x, op=op, algorithm=algorithm, out=out, comm=communicator, chunk=chunk)
    start(communicator, nodes, call, algorithm, flat, target.array, op=op, chunk=chunk).wait()
    return put(target, out)


def start(
    comm: Communicator,
    nodes: Nodes,
    call: str,
    algorithm: str,
    flat: Flat,
    out: Any,
    *,
    op: str,
    chunk: int,
    channel: Callable[[Communicator], Channel] = lambda part: part.channel(),
) -> Work:
    """Start the allreduce, and return it as work under way; ``channel`` opens a channel for each
    block, inside a node and across."""
    x, reduce = flat.array, reduction(op, flat, comm.size)
    inside, across = nodes.inside, nodes.across
    assert inside is not None
    wide = "float32" if reduce.widens else flat.dtype
    itemsize = 4 if reduce.widens else nbytes(x[:1])
    share = inside.size if nodes.is_even else 1
    if algorithm == "auto" and across is not None:
        algorithm = model_of(across).fastest(len(x) * itemsize // share, wide)
    # Not by the algorithm: ranks that are not across together may have chosen different ones.
    per_block = max(1, chunk // itemsize) * len(nodes.members) * share
    steps = []
    for block in shards_of(len(x), -(-len(x) // per_block)):
        # Channels are opened here, in the same order everywhere, and not when a block gets there.
        between = None if across is None else _Across(channel(across), algorithm, op, wide)
        part = x[block]
        run = _even if nodes.is_even else _uneven
        steps.append(run(channel(inside), between, part, part if out is x else out[block], reduce))
    # Blocks overtake each other, and MPI's own collectives must be called in one order.
    is_tagged = algorithm == "auto" or ALGORITHMS[algorithm].is_tagged
    return Work(comm, call, steps, DEPTH if is_tagged else 1)


class _Across:
    """The allreduce of one block's partial results between nodes."""

    def __init__(self, channel: Channel, algorithm: str, op: str, dtype: str) -> None:
        self._channel, self._algorithm = channel, ALGORITHMS[algorithm].run
        self._op, self._dtype = "sum" if op == "mean" else op, dtype

    def run(self, partial: Any) -> Algorithm:
        """Reduce ``partial`` in place."""
        flat = Flat(partial, self._dtype, (len(partial),), lambda done: done)
        reduce = reduction(self._op, flat, self._channel.size)
        return named("across nodes", self._algorithm(self._channel, partial, partial, reduce))


def _even(
    inside: Channel, across: _Across | None, x: Any, out: Any, reduction: Reduction
) -> Algorithm:
    assert across is not None
    rank, size = inside.rank, inside.size
    parts = shards_of(len(x), size)
    mine = parts[rank]
    length = mine.stop - mine.start
    arriving = {peer: reduction.scratch_of_dtype(length) for peer in others(rank, size)}
    messages = [inside.receive(array, peer) for peer, array in arriving.items()]
    messages += [inside.send(x[parts[peer]], peer) for peer in arriving]
    yield Wait(messages, "inside the node, reduce-scatter")
    arriving[rank] = x[mine]
    total = _add_up(arriving, length, reduction)
    del arriving

    if length:
        yield from across.run(total)
    reduction.finish(total, out[mine])

    messages = [inside.receive(out[parts[peer]], peer) for peer in others(rank, size)]
    messages += [inside.send(out[mine], peer) for peer in others(rank, size)]
    yield Wait(messages, "inside the node, allgather")


def _uneven(
    inside: Channel, across: _Across | None, x: Any, out: Any, reduction: Reduction
) -> Algorithm:
    if across is None:
        yield Wait([inside.send(x, 0)], "inside the node, reduce")
        yield Wait([inside.receive(out, 0)], "inside the node, broadcast")
        return
    peers = range(1, inside.size)
    arriving = {peer: reduction.scratch_of_dtype(len(x)) for peer in peers}
    messages = [inside.receive(array, peer) for peer, array in arriving.items()]
    yield Wait(messages, "inside the node, reduce")
    arriving[0] = x
    total = _add_up(arriving, len(x), reduction)
    del arriving

    yield from across.run(total)
    reduction.finish(total, out)

    messages = [inside.send(out, peer) for peer in peers]
    yield Wait(messages, "inside the node, broadcast")


def _add_up(arrays: dict[int, Any], length: int, reduction: Reduction) -> Any:
    """Add up partial results in the order of the ranks."""
    total = reduction.scratch(length)
    reduction.widen(arrays[0], total)
    for peer in range(1, len(arrays)):
        reduction.combine(total, arrays[peer])
    return total
