"""Compression ratios as papers count them, to compare with what is really sent.

    >>> from hvd_compress.advisor.shapes import resnet50
    >>> shapes = resnet50()
    >>> round(ratio(shapes, dgc_paper_bytes(shapes, density=0.001)))
    277

What this package sends is counted from the messages; see :mod:`hvd_compress.stats`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

_FLOAT32 = 4
_RUN_LENGTH = 2


def dense_bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """A gradient in float32."""
    return _FLOAT32 * sum(map(math.prod, shapes.values()))


def dgc_paper_bytes(
    shapes: Mapping[str, tuple[int, ...]],
    density: float,
    is_whole: Callable[[str, tuple[int, ...]], bool] = lambda name, shape: len(shape) == 1,
) -> float:
    """Bytes of a gradient in the encoding of Deep Gradient Compression (Lin et al., ICLR 2018).

    Of every matrix and larger tensor the fraction ``density`` is sent, an element as a value of 32
    bits and the number of zeros before it in 16 bits; one-dimensional tensors are sent as they
    are, or those that ``is_whole`` says.  The fraction is not rounded to whole elements.

    Counted so, ResNet-50 has the paper's ratio of 277, AlexNet 597 and the language model 462.  The
    speech model has 431, where the paper has 608: if the biases of its GRU layers are selected
    from, too, it has 618.  The paper's own 488 MB and 0.74 MB are as 659 to 1.

    What is left out: 16 bits hold at most 65,535 zeros.  A longer gap takes an escape, for instance
    an explicit zero as one more element; the paper does not say which, and does not count it.  If
    elements were chosen at random, one gap in 10**28 would be that long at density 0.001, but a
    gradient that is zero in whole rows (of an embedding, say) has such gaps.
    """
    total = 0.0
    for name, shape in shapes.items():
        n = math.prod(shape)
        whole = is_whole(name, shape)
        total += n * _FLOAT32 if whole else density * n * (_FLOAT32 + _RUN_LENGTH)
    return total


def ratio(shapes: Mapping[str, tuple[int, ...]], sent: float) -> float:
    """Dense bytes / bytes ``sent``."""
    return dense_bytes(shapes) / sent
