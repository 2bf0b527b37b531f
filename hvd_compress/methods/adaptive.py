"""Adaptive thresholds (Dryden, Moon, Jacobs, Van Essen; MLHPC 2016)."""

from __future__ import annotations

import dataclasses
import functools

from hvd_compress import operators
from hvd_compress.aggregators import allgather
from hvd_compress.chain import Chain, chain
from hvd_compress.codecs import column_means
from hvd_compress.methods.chained import Chained
from hvd_compress.schedules import Density
from hvd_compress.transforms import error_feedback


@dataclasses.dataclass(frozen=True)
class AdaptiveThreshold(Chained, name="adaptive"):
    """Send the largest positive and negative elements as two means, keep the rest for later.

    A fraction ``density`` of the positive elements and one of the negative is picked, about; what
    was picked of a sign is sent as its mean.

    State: ``residual``.  Sent: a packed index and one bit an element, and two means a tensor.

    Options:
        density: fraction of the elements of each sign to send, or a schedule.

    Reference: Dryden, Moon, Jacobs, Van Essen, MLHPC 2016.  Differs from it in: thresholds are
    found anew at every step, by ``operators.adaptive_threshold``; indices are not coded by their
    gaps.

    >>> world = World(AdaptiveThreshold(density=0.5), size=1)
    >>> world.exchange([np.array([4.0, 2.0, 1.0, 1.0, -3.0, -5.0, -1.0, -1.0])])[0].mean
    array([ 3.,  3.,  0.,  0., -4., -4.,  0.,  0.])
    """

    reference = "Dryden et al., MLHPC 2016"

    density: Density = 0.01

    @functools.cached_property
    def blocks(self) -> Chain:
        # Of what was picked all elements are one column.
        via = allgather(operators.adaptive_threshold(self.density), column_means())
        return chain(error_feedback(), via=via)
