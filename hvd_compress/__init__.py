"""Gradient compression for Horovod and MPI: the core, which needs nothing but NumPy.

The frameworks have packages of their own, ``hvd_compress.torch`` and ``hvd_compress.tensorflow``;
``hvd_compress.blocks`` has what methods are built from.
"""

from importlib.metadata import PackageNotFoundError, version

from hvd_compress import requests
from hvd_compress.advisor.auto import Auto
from hvd_compress.base import Context, Outcome
from hvd_compress.config import from_config
from hvd_compress.integrations import exports
from hvd_compress.integrations.exports import *  # noqa: F403, which has a list of its own
from hvd_compress.requests import *  # noqa: F403, requests.__all__ is the list
from hvd_compress.schedules import PAPER_DENSITIES

try:
    __version__ = version("hvd_compress")
except PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0+unknown"

__all__ = ["PAPER_DENSITIES", "Auto", "Context", "Outcome", "from_config"]
__all__ += exports.__all__
__all__ += requests.__all__

#: modules that users name, beside what is imported here
_MODULES = {"blocks", "errors", "mpi", "tensorflow", "testing", "torch"}


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__", *(_MODULES & globals().keys())})
