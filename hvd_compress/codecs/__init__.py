"""Codecs: the values of an array in few bits, one family a file."""

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
from hvd_compress.codecs.signs import plus_minus, scaled_sign, sign
from hvd_compress.codecs.ternary import ternary
from hvd_compress.operators.base import Classes

__all__ = [
    "Classes",
    "Codec",
    "column_means",
    "contraction",
    "exponential_dithering",
    "float8",
    "linear",
    "logarithmic",
    "natural",
    "natural_dithering",
    "plus_minus",
    "rounding",
    "scaled_sign",
    "sign",
    "ternary",
    "uniform_dithering",
]
