"""Compression operators, one family a file: selectors say which elements of an array are kept, and
codecs write its values in few bits."""

from hvd_compress.codecs.at_random import random_k
from hvd_compress.codecs.base import Codec
from hvd_compress.codecs.column_means import column_means
from hvd_compress.codecs.contraction import contraction
from hvd_compress.codecs.dithering import (
    exponential_dithering,
    natural_dithering,
    uniform_dithering,
)
from hvd_compress.codecs.floats import float8
from hvd_compress.codecs.linear import linear
from hvd_compress.codecs.logarithmic import logarithmic
from hvd_compress.codecs.rounding import natural, rounding
from hvd_compress.codecs.selector import Classes, Selector
from hvd_compress.codecs.signs import plus_minus, scaled_sign, sign
from hvd_compress.codecs.ternary import ternary
from hvd_compress.codecs.threshold import threshold
from hvd_compress.codecs.top_k import top_k

__all__ = [
    "Classes",
    "Codec",
    "Selector",
    "column_means",
    "contraction",
    "exponential_dithering",
    "float8",
    "linear",
    "logarithmic",
    "natural",
    "natural_dithering",
    "plus_minus",
    "random_k",
    "rounding",
    "scaled_sign",
    "sign",
    "ternary",
    "threshold",
    "top_k",
    "uniform_dithering",
]
