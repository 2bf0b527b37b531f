"""A parameter server: one rank owns the parameters and steps, the others compute gradients.

Here is all that needs no network: :class:`Server` and :class:`Link` are the two ends, which take
and return messages.  :class:`hvd_compress.mpi.ParameterServer` runs them over MPI.
"""

from hvd_compress.systems.servers.messages import ServerStats
from hvd_compress.systems.servers.optimizers import SGD
from hvd_compress.systems.servers.server import Link, Rules, Server

__all__ = [
    "SGD",
    "Link",
    "Rules",
    "Server",
    "ServerStats",
]
