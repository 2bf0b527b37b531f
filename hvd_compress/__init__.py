"""Gradient compression for Horovod and MPI: the core, which needs nothing but NumPy.

The frameworks have packages of their own: ``hvd_compress.torch`` and ``hvd_compress.tensorflow``.
"""

from importlib.metadata import PackageNotFoundError, version

from hvd_compress import aggregators, codecs, exports, operators, transforms
from hvd_compress.aggregators import *  # noqa: F403, each of these has a list of its own
from hvd_compress.base import Alltoall, Batch, Context, Gather, Max, Outcome, Sparse, Sum, Swap
from hvd_compress.chain import Chain, Transform, chain
from hvd_compress.codecs import *  # noqa: F403
from hvd_compress.config import from_config
from hvd_compress.exports import *  # noqa: F403
from hvd_compress.operators import *  # noqa: F403
from hvd_compress.schedules import PAPER_DENSITIES
from hvd_compress.transforms import *  # noqa: F403

try:
    __version__ = version("hvd_compress")
except PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0+unknown"

__all__ = [
    "PAPER_DENSITIES",
    "Alltoall",
    "Batch",
    "Chain",
    "Context",
    "Gather",
    "Max",
    "Outcome",
    "Sparse",
    "Sum",
    "Swap",
    "Transform",
    "chain",
    "from_config",
]
__all__ += aggregators.__all__
__all__ += codecs.__all__
__all__ += exports.__all__
__all__ += operators.__all__
__all__ += transforms.__all__
