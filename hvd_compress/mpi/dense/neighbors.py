"""A message from each rank to its neighbours in a graph, and to no other rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvd_compress.mpi.transport.communicator import Channel
from hvd_compress.mpi.transport.point_to_point import exchange, exchange_open
from hvd_compress.mpi.transport.progress import Algorithm


def neighbors(
    channel: Channel,
    message: np.ndarray,
    targets: Sequence[int],
    sources: Sequence[int],
    equal_sizes: bool = True,
) -> Algorithm:
    """Send ``message`` (1-D, uint8) to each of ``targets``, and return those of ``sources``, in
    their order.  ``equal_sizes`` is a promise that these have as many bytes as ``message``."""
    outgoing, phase = dict.fromkeys(targets, message), "messages of neighbours"
    if equal_sizes:
        buffers = {source: np.empty_like(message) for source in sources}
        arrived = yield from exchange(channel, outgoing, buffers, phase)
    else:
        arrived = yield from exchange_open(channel, outgoing, sources, phase)
    return [arrived[source] for source in sources]
