"""Training methods that are built on the core, for ``method=`` of an optimizer::

    optimizer = hvd.DistributedOptimizer(optimizer, method=hvd.DiLoCo(sync_every=100))

``rounds`` has local steps between exchanges, ``graphs`` training over a graph, ``teachers``
codistillation, and ``servers`` the parameter server.  Their common parts are here: the contract
of a training method, its owner on a rank, and all ranks in one process.
"""

from hvd_compress.systems.base import (
    Finish,
    Mean,
    Start,
    StepContext,
    TrainingMethod,
    Unsent,
)
from hvd_compress.systems.coordinator import Coordinator
from hvd_compress.systems.owner import Owner
from hvd_compress.systems.ranks import Ranks

__all__ = [
    "Coordinator",
    "Finish",
    "Mean",
    "Owner",
    "Ranks",
    "Start",
    "StepContext",
    "TrainingMethod",
    "Unsent",
]
