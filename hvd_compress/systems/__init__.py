"""Systems that are built on the core: each says what is sent, and what is done with what came.

``rounds`` has local steps between exchanges, ``graphs`` training over a graph, ``teachers``
codistillation, and ``servers`` the parameter server.  Here is what they have in common: the
contract of a training method, the owner of a system on a rank, and all ranks in one process.
"""

from hvd_compress.systems.base import (
    Finish,
    Mean,
    Start,
    StepContext,
    TrainingMethod,
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
]
