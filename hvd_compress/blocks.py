"""The building blocks that methods are chained from; see docs/extending.md::

from hvd_compress.blocks import allgather, chain, error_feedback, top_k

method = chain(error_feedback(), via=allgather(top_k(0.01)))
"""

from hvd_compress import aggregators, codecs, operators, transforms
from hvd_compress.aggregators import *  # noqa: F403, each of these has a list of its own
from hvd_compress.chain import Aggregator, Chain, Transform, chain
from hvd_compress.codecs import *  # noqa: F403
from hvd_compress.operators import *  # noqa: F403
from hvd_compress.transforms import *  # noqa: F403

__all__ = ["Aggregator", "Chain", "Transform", "chain"]
__all__ += aggregators.__all__
__all__ += codecs.__all__
__all__ += operators.__all__
__all__ += transforms.__all__


def __dir__() -> list[str]:
    return sorted(__all__)
