"""The building blocks that methods are chained from; see docs/extending.md::

    from hvd_compress.blocks import allgather, chain, error_feedback, top_k

    method = chain(error_feedback(), via=allgather(top_k(0.01)))

Blocks work on flat arrays of float32, which half precisions are widened to, or float64: x below, of
n elements (d in formulas of papers).  Options are fields of frozen dataclasses, and are checked
when a block is made: ``ConfigError`` names the option and its choices.

- A transform changes a gradient before the exchange, ``update(x, state, context)``, and learns
  afterwards what was sent of it, ``settle(sent, state, context)``.
- An aggregator averages over the ranks.  It is written ``via=``.
- A coding says what one rank sends as a message that stands alone, ``encode(x, state, context)``,
  and what a receiver reads in some, ``decode(messages, like, context)``.
- An operator picks elements: ``select(x, k, context)`` returns ascending indices, int64.
- A codec turns n numbers into bytes (uint8) and back: ``encode(x, random)`` and
  ``decode(code, n, dtype)``, where ``random`` is a NumPy generator, for codecs that draw.

The meaning of ``density``, ``momentum``, "State", "Sent" and ``World`` stands once for all in
:mod:`hvd_compress.methods`.
"""

from hvd_compress import codecs, meetings, transforms
from hvd_compress.base import Coding, Decoded, Encoded
from hvd_compress.chain import Aggregator, Chain, Transform, chain
from hvd_compress.codecs import *  # noqa: F403
from hvd_compress.meetings import *  # noqa: F403, each of these has a list of its own
from hvd_compress.transforms import *  # noqa: F403

__all__ = ["Aggregator", "Chain", "Coding", "Decoded", "Encoded", "Transform", "chain"]
__all__ += meetings.__all__
__all__ += codecs.__all__
__all__ += transforms.__all__

__dir__ = __all__.copy
