"""Select the k elements of largest magnitude, k = ceil(density * n).

Large arrays are searched as by Lin et al. (ICLR 2018).  The threshold of a strided sample filters
the elements, and the survivors are ranked exactly.  A threshold that lets too few pass is lowered.
It finds the same elements as ranking all magnitudes, several times faster.  TensorFlow has a search
of its own, in operations of its graphs.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context
from hvd_compress.codecs.selector import Selector
from hvd_compress.config import converted
from hvd_compress.schedules import Density, as_density, density_at

# Below this size ranking everything is as fast as sampling first.
_SMALL = 1 << 14
# The fraction of the elements that are in the sample; the paper has 0.1 to 1 %.
_SAMPLE = 0.01
# Elements of the sample expected above the threshold; fewer make the threshold a gamble.
_HITS = 16


@dataclasses.dataclass(frozen=True)
class DensitySelector(Selector):
    """The base of operators that select k = ceil(density * n) elements."""

    density: Density

    def count(self, n: int, context: Context) -> int:
        return count(n, density_at(self.density, context.step, context.epoch))

    def kept(self, d: int, context: Context) -> float:
        """Return k/d: the k largest elements have at least that share, and exactly that if all are
        equally large.  At random, every element is drawn with that probability."""
        return self.count(d, context) / d


@dataclasses.dataclass(frozen=True)
class top_k(DensitySelector, name="top_k"):
    """The k = ceil(density * n) elements of largest magnitude; of equal ones the first.

    The selection is a function of the values alone, the same in all frameworks and on all devices.

    Options:
        density: a fraction or a schedule.

    Reference: Lin et al., ICLR 2018, for the sampled search.  Differs from the authors' code, which
    sends what passes the sampled threshold, 0.8 k to 1.3 k elements.

    >>> select = top_k(density=0.5)
    >>> select.count(4, Context()), select.select(np.array([4.0, 1.0, 0.0, -2.0]), 2, Context())
    (2, array([0, 3]))
    """

    density: Density = dataclasses.field(default=0.001, metadata=converted(as_density))

    def select(self, x: Array, k: int | None, context: Context) -> Array:
        assert k is not None
        xp = backend_of(x)
        magnitude = xp.abs(x)
        if xp.traces:
            return xp.top_k(magnitude, k)
        if xp.size(x) <= _SMALL:
            return _exact(xp, magnitude, k)
        return _sampled(xp, magnitude, k, context.step)


def count(n: int, density: float) -> int:
    # 1e-9: 100 * 0.07 is 7.000000000000001 in floating point, and must stay 7.
    return min(n, max(1, math.ceil(n * density - 1e-9)))


def _exact(xp: Any, magnitude: Array, k: int) -> Array:
    n = xp.size(magnitude)
    if k in (0, n):
        return _first(xp, magnitude, k)
    threshold = xp.kth_largest(magnitude, k)
    above = xp.nonzero(magnitude > threshold)
    missing = k - xp.size(above)
    if missing == 0:
        return above
    ties = xp.nonzero(magnitude == threshold)
    if xp.size(ties) < missing:  # NaN compares with nothing: everything is as good as anything
        return _first(xp, magnitude, k)
    return xp.sort(xp.concat([above, ties[:missing]]))


def _first(xp: Any, like: Array, k: int) -> Array:
    return xp.nonzero(xp.full_like(like[:k], 1.0) > 0)


def _sampled(xp: Any, magnitude: Array, k: int, step: int) -> Array:
    n = xp.size(magnitude)
    wanted = max(_SAMPLE * n, _HITS * n / k)
    stride = max(1, int(n / wanted))
    stride -= stride % 2 == 0  # an odd stride does not keep step with rows of even length
    sample = magnitude[step % stride :: stride]
    expected = k * xp.size(sample) / n
    # Three standard deviations deeper than needed: a second pass costs more than extra survivors.
    rank = min(xp.size(sample), math.ceil(expected + 3 * math.sqrt(expected) + 1))
    threshold = xp.kth_largest(sample, rank)
    for _ in range(10):
        survivors = xp.nonzero(magnitude >= threshold)
        if xp.size(survivors) >= k:
            chosen = _exact(xp, xp.take(magnitude, survivors), k)
            return xp.take(survivors, chosen)
        threshold = threshold * 0.8
    return _exact(xp, magnitude, k)
