"""The machines that the ranks of a communicator share."""

from __future__ import annotations

from collections.abc import Sequence

from mpi4py import MPI

from hvd_compress.errors import ConfigError
from hvd_compress.mpi.transport.communicator import Communicator

#: how messages call the levels
INSIDE, ACROSS = "inside the node", "across nodes"


class Nodes:
    """The machines that a communicator runs on.

    Args:
        rank: this one.
        leaders: by rank, the lowest rank on its machine.

    Attributes:
        members: ranks of each node, ascending.
        is_flat: there is one node, or every rank has its own.
        is_even: all nodes have the same number of ranks.
        owners: how many ranks of a node add up for it: if even, all; otherwise the first.
        inside: the ranks of this rank's node.
        across: if even, the ranks with the same place in their nodes; otherwise the first ranks of
            all nodes, ``None`` on others.
    """

    def __init__(self, rank: int, leaders: Sequence[int]) -> None:
        self.members = [
            tuple(other for other, its in enumerate(leaders) if its == leader)
            for leader in sorted(set(leaders))
        ]
        self.is_flat = len(self.members) in (1, len(leaders))
        self.is_even = len(set(map(len, self.members))) == 1
        self.owners = len(self.members[0]) if self.is_even else 1
        self.inside = next(members for members in self.members if rank in members)
        place, self.across = self.inside.index(rank), None
        if place < self.owners:
            self.across = tuple(members[place] for members in self.members)


def suffix_of(nodes: bool | int) -> str:
    """Return what follows the name of an algorithm that goes by way of nodes, if it does."""
    if nodes is False:
        return ""
    return f" {ACROSS}" + ("" if nodes is True else f" of {nodes}")


def nodes_of(comm: Communicator, nodes: bool | int = True) -> Nodes:
    """Return the nodes of a communicator, which are found at the first call; that one is a
    collective.

    Args:
        nodes: the number of consecutive ranks that make a node, of which the last one may have
            fewer; ``True`` asks MPI which ranks share memory.
    """
    ranks_per_node = None if nodes is True else nodes
    if nodes is not True and (type(nodes) is not int or nodes < 1):
        raise ConfigError(f"nodes={nodes!r}: True, or the ranks of each node, 1 or more")
    if ranks_per_node not in comm._nodes:
        comm._nodes[ranks_per_node] = Nodes(comm.rank, _leaders(comm, ranks_per_node))
    return comm._nodes[ranks_per_node]


def _leaders(comm: Communicator, ranks_per_node: int | None) -> list[int]:
    # MPI's own collectives, below, have no time-out: first make sure that everyone is here.
    comm.agree(f"finding the nodes, nodes={ranks_per_node or True}", always=True)
    if ranks_per_node is not None:
        return [rank // ranks_per_node * ranks_per_node for rank in range(comm.size)]
    shared = comm.mpi.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
    leader = shared.bcast(comm.rank)
    shared.Free()
    return comm.mpi.allgather(leader)
